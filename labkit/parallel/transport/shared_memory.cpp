// Messages between the ranks of one host, through memory that all of them map (`shared_memory.py`).
//
// Each rank has a mailbox: two semaphores and a ring of headers for every other rank, slots for messages, a flag that the
// rank has left the group, or failed in a call, and a count of collectives that are over. Messages are cut into chunks
// that fit slots.
//
//     send      copy the chunk into a free slot, write a header (which slot, how many bytes, of which call), post `filled`
//     receive   wait for `filled`, read the header, copy or add from the slot straight into place, post `taken`
//     end       count the collective: whoever still waits for this rank gives up
//
// Order. Slot and header are written before `filled` is posted, and again only after the reader's `taken` has been taken.
// POSIX promises that what a process wrote before sem_post is visible after the wait that took it.
//
// Progress. A rank blocks only for its oldest unfinished chunk: for that chunk's message, or for the slot or header that
// its own message needs, which older messages hold until their readers, at older chunks still, have taken them. So the
// rank whose oldest unfinished chunk is the oldest of all can always go on. Sends of later chunks are tried only.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <poll.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace {

// result = (a + b) / divisor; `result` may be `a`. Sum and quotient are rounded to the dtype, as torch's operators round.
template <class T>
void combine(void* result, const void* first, const void* second, long n_bytes, long divisor) {
    auto out = static_cast<T*>(result);
    auto a = static_cast<const T*>(first), b = static_cast<const T*>(second);
    long n = n_bytes / long(sizeof(T));
    std::conditional_t<std::is_integral_v<T>, T, decltype(T() + 0.0f)> by = divisor;
    if (divisor == 1) {
#pragma GCC ivdep
        for (long i = 0; i < n; i++) out[i] = a[i] + b[i];
    } else {
#pragma GCC ivdep
        for (long i = 0; i < n; i++) out[i] = T(a[i] + b[i]) / by;
    }
}

// In the order of `_ADDED_DTYPES` in shared_memory.py.
void (*const COMBINE[])(void*, const void*, const void*, long, long) = {
    combine<double>, combine<float>, combine<c10::Half>, combine<c10::BFloat16>, combine<int64_t>};
const int N_DTYPES = 5, UNKNOWN = -1;

const long CACHE_LINE = 64, HEADERS = 16, SLOTS = 8, SLOT_BYTES = 256 << 10;
const long AHEAD = 4;  // chunks that are sent before the oldest one is complete, or as many as the longest round has
// A rank that waits looks, yields between looks, then sleeps. 4 ranks on 2 cores take least time with 300 yields, up to
// a third more with 30 and up to a tenth more with 1000 (4 KiB to 10 MiB).
const int LOOKS = 1000, YIELDS = 300;
const long SPIN_NS = 500'000, SLEEP_NS = 200'000'000;

struct Vector {  // contiguous; no bytes: no message
    char* data = nullptr;
    long n_bytes = 0, dtype = UNKNOWN;
    long n_chunks() const { return (n_bytes + SLOT_BYTES - 1) / SLOT_BYTES; }
    Vector chunk(long k) const {
        return {data + k * SLOT_BYTES, std::clamp(n_bytes - k * SLOT_BYTES, 0L, SLOT_BYTES), dtype};
    }
};

struct Transfer {  // as in base.py, or a chunk of one
    Vector outgoing, incoming, into;
    long target, source, divisor;
    bool is_added;
    long after;  // how many chunks are complete before it is sent
    long n_chunks() const { return std::max(outgoing.n_chunks(), incoming.n_chunks()); }
    Transfer chunk(long k, long after) const {
        return {outgoing.chunk(k), incoming.chunk(k), into.chunk(k), target, source, divisor, is_added, after};
    }
};

using Rounds = std::vector<std::vector<Transfer>>;

struct Message {
    long target, number;  // how many were sent to that rank before
};

struct Failure {
    PyObject* type;  // nullptr: Python's error is set already
    std::string text;
};

template <class... Words>
[[noreturn]] void refuse(PyObject* type, Words... words) {
    std::ostringstream text;
    (text << ... << words);
    throw Failure{type, text.str()};
}

long as_long(PyObject* number) {
    long value = number ? PyLong_AsLong(number) : -1;
    if (value == -1 && PyErr_Occurred()) throw Failure{nullptr, ""};
    Py_XDECREF(number);
    return value;
}

long now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

struct Mailboxes {
    long rank, timeout_ns;
    bool has_own_core;  // then a rank spins before it sleeps
    std::vector<long> addresses, processes;  // of mailboxes, and descriptors of processes (pidfd), by rank
    PyObject* dtypes;                        // a tuple, as long as `COMBINE`
    long p = long(addresses.size());
    std::vector<long> sent = std::vector<long>(p), taken = sent, received = sent;  // messages, by the other rank
    std::vector<Message> in_slot[SLOTS] = {};                // that may not have been taken yet
    Transfer staged = {};  // the one whose chunk was copied into a slot last
    long slots_used = 0, staged_slot = 0, sent_call = 0, expected_call = 0;
    bool is_busy = false;
    PyThreadState* thread = nullptr;

    // Layout of a mailbox
    static long size(long p) { return (2 * p + p * HEADERS + 1) * CACHE_LINE + SLOTS * SLOT_BYTES; }
    char* start(long owner) { return reinterpret_cast<char*>(addresses[owner]); }
    sem_t* semaphore(long owner, long n) { return reinterpret_cast<sem_t*>(start(owner) + n * CACHE_LINE); }
    sem_t* filled(long sender, long target) { return semaphore(sender, target); }
    sem_t* taken_by(long reader, long sender) { return semaphore(sender, p + reader); }
    long* header(long sender, long target, long number) {
        return reinterpret_cast<long*>(start(sender) + (2 * p + target * HEADERS + number % HEADERS) * CACHE_LINE);
    }
    long* has_left(long owner) { return header(owner, p, 0); }  // not 0: the rank has left the group, or failed
    long* ended(long owner) { return has_left(owner) + 1; }     // how many collectives are over there, or refused
    char* slot(long owner, long number) { return start(owner) + size(p) - (SLOTS - number) * SLOT_BYTES; }

    // Let ranks that wait for this one give up.
    void leave() { __atomic_store_n(has_left(rank), 1, __ATOMIC_SEQ_CST); }

    // Take a semaphore that rank `peer` posts.
    void wait(sem_t* awaited, long peer) {
        for (int looks = has_own_core ? LOOKS : 1; looks; looks--)
            if (sem_trywait(awaited) == 0) return;
        long start = now_ns(), now = start;
        for (int yields = YIELDS; has_own_core ? now < start + SPIN_NS : yields-- > 0; now = now_ns()) {
            sched_yield();
            if (sem_trywait(awaited) == 0) return;
        }
        while (true) {
            long end = now_ns() + SLEEP_NS;
            timespec until = {end / 1'000'000'000, end % 1'000'000'000};
            if (sem_clockwait(awaited, CLOCK_MONOTONIC, &until) == 0) return;
            pollfd process = {int(processes[peer]), POLLIN, 0};
            bool has_ended = __atomic_load_n(has_left(peer), __ATOMIC_SEQ_CST) || poll(&process, 1, 0) > 0;
            bool is_late = now_ns() > start + timeout_ns;
            bool is_over = __atomic_load_n(ended(peer), __ATOMIC_SEQ_CST) > *ended(rank);
            PyEval_RestoreThread(thread);
            bool is_interrupted = PyErr_CheckSignals() != 0;
            thread = PyEval_SaveThread();
            if (is_interrupted) throw Failure{nullptr, ""};
            if (!has_ended && !is_late && !is_over) continue;
            if (sem_trywait(awaited) == 0) return;  // posted before the other rank, or its call, ended
            if (has_ended) refuse(PyExc_RuntimeError, "rank ", peer, " ended or failed while this rank waited for it");
            if (is_over)
                refuse(PyExc_RuntimeError, "every rank must make the same call, with one shape and dtype: rank ", peer,
                       " has refused or ended it, and rank ", rank, " waits for a message");
            refuse(PyExc_TimeoutError, "waited too long for rank ", peer);
        }
    }

    // Whether a message has been taken; if `is_patient`, wait until it has.
    bool is_taken(Message message, bool is_patient) {
        long& count = taken[message.target];
        for (; count <= message.number; count++)
            if (is_patient)
                wait(taken_by(message.target, rank), message.target);
            else if (sem_trywait(taken_by(message.target, rank)) != 0)
                return false;
        return true;
    }

    // Send a chunk; return false instead of waiting if not `is_patient`.
    bool send(const Transfer& chunk, bool is_patient) {
        const Vector& outgoing = chunk.outgoing;
        if (!outgoing.n_bytes) return true;
        Message message{chunk.target, sent[chunk.target]};
        if (!is_taken({chunk.target, message.number - HEADERS}, is_patient)) return false;  // its header is free
        // One copy serves all targets: transfers of a round do not write what others of it send.
        const Vector& last = staged.outgoing;
        if (outgoing.data != last.data || outgoing.n_bytes != last.n_bytes || chunk.after != staged.after) {
            auto& readers = in_slot[slots_used % SLOTS];
            for (Message earlier : readers)
                if (!is_taken(earlier, is_patient)) return false;
            readers.clear();
            staged_slot = slots_used++ % SLOTS, staged = chunk;
            memcpy(slot(rank, staged_slot), outgoing.data, outgoing.n_bytes);
        }
        long* place = header(rank, message.target, message.number);
        place[0] = staged_slot, place[1] = outgoing.n_bytes, place[2] = sent_call;
        sem_post(filled(rank, message.target));
        in_slot[staged_slot].push_back(message);
        sent[message.target]++;
        return true;
    }

    void receive(const Transfer& chunk) {
        const Vector& incoming = chunk.incoming;
        long source = chunk.source;
        if (!incoming.n_bytes) return;
        wait(filled(source, rank), source);
        long* place = header(source, rank, received[source]++);
        if (place[1] != incoming.n_bytes || place[2] != expected_call)
            refuse(PyExc_RuntimeError, "every rank must make the same call, with one shape and dtype: rank ", source,
                   " sent ", place[1], " bytes to rank ", rank, ", which expected ", incoming.n_bytes,
                   place[1] == incoming.n_bytes ? " of another call" : "");
        char *message = slot(source, place[0]), *result = chunk.into.n_bytes ? chunk.into.data : incoming.data;
        if (chunk.is_added)
            COMBINE[incoming.dtype](result, incoming.data, message, incoming.n_bytes, chunk.divisor);
        else
            memcpy(incoming.data, message, incoming.n_bytes);
        sem_post(taken_by(rank, source));
    }

    // All chunks in the order in which ranks take them, as `cut_rounds` in base.py: chunk k of round i in wave i + k.
    std::vector<Transfer> cut_rounds(const Rounds& rounds) {
        long n = long(rounds.size()), most = 1;
        for (const auto& round : rounds)
            for (const Transfer& transfer : round) most = std::max(most, transfer.n_chunks());
        std::vector<Transfer> chunks;
        std::vector<long> ends(n), ends_before;  // by round: how many chunks are complete once its last one so far is
        for (long wave = 0; wave < n + most - 1; wave++) {
            ends_before = ends;
            for (long i = std::max(0L, wave - most + 1); i <= std::min(wave, n - 1); i++) {
                for (const Transfer& transfer : rounds[i])
                    if (wave - i < transfer.n_chunks())
                        chunks.push_back(transfer.chunk(wave - i, i ? ends_before[i - 1] : 0));
                ends[i] = long(chunks.size());
            }
        }
        return chunks;
    }

    void carry_out(const Rounds& rounds) {
        std::vector<Transfer> chunks = cut_rounds(rounds);
        long count = long(chunks.size()), ahead = AHEAD;
        for (const auto& round : rounds) ahead = std::max(ahead, long(round.size()));
        for (long number = 0, begun = 0; number < count; receive(chunks[number++])) {
            for (; begun <= number; begun++) send(chunks[begun], true);
            long last = std::min(count, number + ahead);
            while (begun < last && chunks[begun].after <= number && send(chunks[begun], false)) begun++;
        }
    }

    Vector read_vector(PyObject* tensor, bool is_added) {
        static PyObject* const IS_CONTIGUOUS = PyUnicode_InternFromString("is_contiguous");
        static PyObject* const DATA_PTR = PyUnicode_InternFromString("data_ptr");
        static PyObject* const NBYTES = PyUnicode_InternFromString("nbytes");
        static PyObject* const DTYPE = PyUnicode_InternFromString("dtype");
        Vector vector;
        if (tensor == Py_None) return vector;
        if (!as_long(PyObject_CallMethodNoArgs(tensor, IS_CONTIGUOUS)))
            refuse(PyExc_ValueError, "expected contiguous vectors to send and receive");
        vector.data = reinterpret_cast<char*>(as_long(PyObject_CallMethodNoArgs(tensor, DATA_PTR)));
        vector.n_bytes = as_long(PyObject_GetAttr(tensor, NBYTES));
        if (!is_added) return vector;
        PyObject* dtype = PyObject_GetAttr(tensor, DTYPE);
        Py_XDECREF(dtype);  // torch keeps it
        for (int i = 0; i < N_DTYPES; i++)
            if (dtype == PyTuple_GET_ITEM(dtypes, i)) vector.dtype = i;
        if (vector.dtype == UNKNOWN) refuse(PyExc_ValueError, "expected a float dtype, or int64, to add");
        return vector;
    }

    Transfer read_transfer(PyObject* transfer) {
        auto field = [transfer](int i) { return PyTuple_GET_ITEM(transfer, i); };
        auto number = [&](int i) { return as_long(Py_NewRef(field(i))); };
        bool is_added = field(4) == Py_True;
        Vector outgoing = read_vector(field(0), false), incoming = read_vector(field(2), is_added);
        return {outgoing, incoming, read_vector(field(6), false), number(1), number(3), number(5), is_added, 0};
    }

    Rounds read_rounds(PyObject* list) {
        if (!PyList_Check(list)) refuse(PyExc_TypeError, "expected a list of rounds");
        Rounds rounds(PyList_GET_SIZE(list));
        for (size_t i = 0; i < rounds.size(); i++) {
            PyObject* round = PyList_GET_ITEM(list, i);
            if (!PyList_Check(round)) refuse(PyExc_TypeError, "expected a list of transfers for each round");
            for (Py_ssize_t j = 0; j < PyList_GET_SIZE(round); j++)
                rounds[i].push_back(read_transfer(PyList_GET_ITEM(round, j)));
        }
        return rounds;
    }

    // Other threads may run Python meanwhile. No scope guards: a Python that ends, ends this thread as it comes back.
    void run(PyObject* list, long sending, long receiving) {
        if (is_busy)
            refuse(PyExc_RuntimeError,
                   "an earlier call on this group is not over, or was cut short: make a new group or wrapper");
        Rounds rounds = read_rounds(list);
        std::optional<Failure> failure;
        is_busy = true, staged = {}, sent_call = sending, expected_call = receiving;
        thread = PyEval_SaveThread();
        try {
            carry_out(rounds);
        } catch (const Failure& error) {
            failure = error;
        }
        PyEval_RestoreThread(thread);
        if (failure) {  // and stay busy: its messages are still there
            leave();
            throw *failure;
        }
        is_busy = false;
    }
};

}  // namespace

// What Python calls (ctypes.PyDLL), with the interpreter's lock held. nullptr: an error is set.

extern "C" {
long mailbox_bytes(long p) { return Mailboxes::size(p); }
long slot_bytes() { return SLOT_BYTES; }

// Make this rank's semaphores. `dtypes`: a tuple in the order of `COMBINE`, which the caller keeps alive.
Mailboxes* connect_mailboxes(long p, long rank, const long* addresses, const long* processes, double timeout_s,
                             bool has_own_core, PyObject* dtypes) {
    auto mailboxes = new Mailboxes{
        rank, long(timeout_s * 1e9), has_own_core, {addresses, addresses + p}, {processes, processes + p}, dtypes};
    for (long other = 0; other < p; other++) {
        sem_init(mailboxes->filled(rank, other), 1, 0);
        sem_init(mailboxes->taken_by(other, rank), 1, 0);
    }
    return mailboxes;
}

// This rank sends no more messages of its collective.
void end_call(Mailboxes* mailboxes) { __atomic_fetch_add(mailboxes->ended(mailboxes->rank), 1, __ATOMIC_SEQ_CST); }

// Let ranks that wait for this one give up. Another thread may be in a call.
void leave_group(Mailboxes* mailboxes) { mailboxes->leave(); }

void disconnect_mailboxes(Mailboxes* mailboxes) {
    mailboxes->leave();
    delete mailboxes;
}

// `rounds`: a list of lists of `Transfer`. `sending`, `receiving`: checksums of the calls that messages belong to, those of
// this rank and those of others.
PyObject* run_rounds(Mailboxes* mailboxes, PyObject* rounds, long sending, long receiving) {
    try {
        mailboxes->run(rounds, sending, receiving);
    } catch (const Failure& failure) {
        if (failure.type) PyErr_SetString(failure.type, failure.text.c_str());
        return nullptr;
    }
    Py_RETURN_NONE;
}
}
