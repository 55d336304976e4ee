// What messages.py, swaps.py and boards.py do, compiled: the same memory, the same semaphores in the same order, the
// same results to the bit, so that a rank with this and a rank with Python's version can be in one group. Read those
// first; names are theirs. Left to Python: waits of more than 20 ms, with their time-outs, signals and ended ranks, and
// the errors of messages that do not fit.

#include <pybind11/pybind11.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#elif !defined(__ARM_FP16_FORMAT_IEEE)
#error "this processor does not convert float16"
#endif

namespace py = pybind11;

namespace {

// Arithmetic. Every addition and every division is rounded to the type, as torch's operators do.

template <class T>
struct Plain {
    using Stored = T;
    static T load(T x) { return x; }
    static T store(T x) { return x; }
};

struct BFloat16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
    static uint16_t store(float x) {
        auto bits = __builtin_bit_cast(uint32_t, x);
        return uint16_t(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0);
    }
};

struct Float16 {
#if defined(__F16C__)
    using Stored = uint16_t;
    static float load(uint16_t x) { return _cvtsh_ss(x); }
    static uint16_t store(float x) { return _cvtss_sh(x, 0); }
#else
    using Stored = __fp16;
    static float load(__fp16 x) { return x; }
    static __fp16 store(float x) { return __fp16(x); }
#endif
};

// to = (a + b) / divisor, and a / divisor without b. `to` may be `a`.
template <class N>
void combine(void* result, const void* first, const void* second, long n_bytes, long divisor) {
    using T = typename N::Stored;
    auto to = static_cast<T*>(result);
    auto a = static_cast<const T*>(first), b = static_cast<const T*>(second);
    long n = n_bytes / long(sizeof(T));
    auto by = decltype(N::load(T()))(divisor);
    auto fill = [=](auto value) {
#pragma GCC ivdep
        for (long i = 0; i < n; i++) to[i] = value(i);
    };
    if (!b)
        fill([=](long i) { return N::store(N::load(a[i]) / by); });
    else if (divisor == 1)
        fill([=](long i) { return N::store(N::load(a[i]) + N::load(b[i])); });
    else
        fill([=](long i) { return N::store(N::load(N::store(N::load(a[i]) + N::load(b[i]))) / by); });
}

void (*const COMBINE[])(void*, const void*, const void*, long, long) = {
    combine<Plain<double>>, combine<Plain<float>>, combine<Float16>, combine<BFloat16>, combine<Plain<int64_t>>};
const long SIZE[] = {8, 4, 2, 2, 8};  // bytes
const int TYPES = 5, UNKNOWN = -1;

// One rank's end

const long SPIN_NS = 500000, PATIENCE_NS = 20000000, BLOCK_BYTES = 16 << 10;
const long LINE = 64;  // bytes of a semaphore, a note, a header
// Before a rank sleeps that has no core of its own. 4 ranks on 2 cores, time over gloo's at 4, 64 KiB, 1, 10 MiB:
// 30 yields .26 .31 .48 .41; 300 yields .23 .28 .32 .38; 1000 yields .25 .27 .35 .40.
const int LOOKS = 200, YIELDS = 300;
enum { WAIT_FOR_PEER, WAIT_FOR_ANY, REFUSE_LENGTH, REFUSE_KIND, REFUSE_PART };  // of Python's functions

struct Vector {  // a tensor, or none
    PyObject* object = nullptr;
    char* data = nullptr;
    long n_bytes = 0;
    int type = UNKNOWN;
};

struct Move {  // a step
    Vector outgoing, incoming, into;
    long target, source, divisor;
    bool is_added;
};

// What Python says, which may be an error.
py::object said(PyObject* result) {
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

char* pointer(py::handle address) { return static_cast<char*>(PyLong_AsVoidPtr(address.ptr())); }

std::vector<char*> pointers(const py::tuple& addresses) {
    std::vector<char*> found;
    for (py::handle address : addresses) found.push_back(pointer(address));
    return found;
}

void check_type(const Vector& vector) {
    if (vector.type == UNKNOWN) throw py::value_error("expected a tensor of a float type, or of int64, to add");
}

PyObject* const IS_CONTIGUOUS = PyUnicode_InternFromString("is_contiguous");
PyObject* const DATA_PTR = PyUnicode_InternFromString("data_ptr");
PyObject* const NBYTES = PyUnicode_InternFromString("nbytes");
PyObject* const DTYPE = PyUnicode_InternFromString("dtype");

struct Failed {};  // as Python's exception says

using Message = std::pair<long, long>;                    // to whom, and its number
using Allocation = std::pair<std::vector<char*>, long>;  // of each rank, and its bytes

struct Link {
    long rank, notes_at, swaps_at, most_swapped, boards_at, most_shown, notes, slots, slot_bytes, by_reference;
    bool spin;
    py::tuple addresses, functions, types;
    std::vector<char*> mailboxes = pointers(addresses);
    long p = mailboxes.size();
    PyThreadState* thread;
    std::map<long, Allocation> allocations;  // 0 is the outbox
    std::vector<long> sent = std::vector<long>(p), taken = sent, received = sent, turns = sent;
    std::vector<std::vector<Message>> in_slot = std::vector<std::vector<Message>>(slots);
    std::deque<std::pair<long, Message>> referenced;  // with the number of their step
    PyObject* staged;
    long slots_used = 0, staged_at, staged_slot;

    sem_t* semaphore(long owner, long number) { return reinterpret_cast<sem_t*>(mailboxes[owner] + number * LINE); }
    void post(long owner, long number) { sem_post(semaphore(owner, number)); }
    long filled(long target) { return target; }
    long taken_by(long reader) { return p + reader; }
    long swapped(long target) { return 2 * p + target; }
    long gate() { return 3 * p; }
    long lock() { return 3 * p + 1; }

    long* words(char* at) { return reinterpret_cast<long*>(at); }
    long* note(long sender, long target, long number) {
        return words(mailboxes[sender] + notes_at + (target * notes + number % notes) * LINE);
    }
    char* slot(long owner, long target, long turn) {
        return mailboxes[owner] + swaps_at + (2 * ((target - owner - 1 + p) % p) + turn) * (LINE + most_swapped);
    }
    char* board(long owner, long number) { return mailboxes[owner] + boards_at + (number & 1) * (LINE + most_shown); }

    // Call one of Python's functions, from where other threads may run Python.
    template <class... Longs>
    void call(int which, Longs... values) {
        PyEval_RestoreThread(thread);
        PyObject* function = PyTuple_GET_ITEM(functions.ptr(), which);
        PyObject* result = PyObject_CallFunction(function, &"llll"[4 - sizeof...(values)], values...);
        Py_XDECREF(result);
        thread = PyEval_SaveThread();
        if (!result) throw Failed();
    }

    // Work while other threads may run Python. No guards: a Python that ends, ends this thread as it comes back, which
    // a destructor does not survive.
    template <class F>
    void outside(F work) {
        thread = PyEval_SaveThread();
        try {
            work();
        } catch (Failed&) {
        }
        PyEval_RestoreThread(thread);
        if (PyErr_Occurred()) throw py::error_already_set();
    }

    // Take a semaphore of `owner`, which `peer` posts; a negative one is any rank.
    void wait(long owner, long number, long peer) {
        sem_t* awaited = semaphore(owner, number);
        for (int looks = spin ? LOOKS : 1; looks; looks--) {
            if (sem_trywait(awaited) == 0) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        long start = now_ns(), now = start;
        for (int yields = YIELDS; spin ? now < start + SPIN_NS : yields-- > 0; now = now_ns()) {
            sched_yield();
            if (sem_trywait(awaited) == 0) return;
        }
        timespec until = {(now + PATIENCE_NS) / 1000000000, (now + PATIENCE_NS) % 1000000000};
        if (sem_clockwait(awaited, CLOCK_MONOTONIC, &until) == 0) return;
        if (peer < 0)
            call(WAIT_FOR_ANY, owner, number);
        else
            call(WAIT_FOR_PEER, owner, number, peer);
    }

    void refuse(long other, long sent, long expected) { call(REFUSE_LENGTH, other, sent, rank, expected); }

    static long now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000000000 + now.tv_nsec;
    }

    void take_in(const Move& move, const char* message) {
        auto& to = move.incoming;
        if (move.is_added)
            COMBINE[to.type](move.into.data ? move.into.data : to.data, to.data, message, to.n_bytes, move.divisor);
        else if (move.divisor > 1)
            COMBINE[to.type](to.data, message, nullptr, to.n_bytes, move.divisor);
        else
            memcpy(to.data, message, to.n_bytes);
    }

    // swaps.py

    bool is_swap(const Move& move) {
        long sent = move.outgoing.n_bytes, expected = move.incoming.n_bytes;
        return move.target == move.source && std::min(sent, expected) > 0 && std::max(sent, expected) <= most_swapped;
    }

    void swap(const Move& move) {
        long other = move.target, turn = turns[other];
        turns[other] = 1 - turn;
        char *own = slot(rank, other, turn), *others = slot(other, rank, turn);
        memcpy(own + LINE, move.outgoing.data, *words(own) = move.outgoing.n_bytes);
        post(rank, swapped(other));
        wait(other, swapped(rank), other);
        if (*words(others) != move.incoming.n_bytes) refuse(other, *words(others), move.incoming.n_bytes);
        take_in(move, others + LINE);
    }

    // messages.py

    bool is_taken(const Message& message, bool is_patient) {
        auto [target, number] = message;
        for (; taken[target] <= number; taken[target]++)
            if (is_patient)
                wait(rank, taken_by(target), target);
            else if (sem_trywait(semaphore(rank, taken_by(target))) != 0)
                return false;
        return true;
    }

    Message tell(long target, long allocation, long offset, long n_bytes) {
        long* place = note(rank, target, sent[target]);
        place[0] = allocation, place[1] = offset, place[2] = n_bytes;
        post(rank, filled(target));
        return {target, sent[target]++};
    }

    // The allocation in which the outgoing part lies, if the step does not change it; 0 for none.
    long place(const Vector& out, const Vector& in) {
        if (in.data && in.data < out.data + out.n_bytes && out.data < in.data + in.n_bytes) return 0;
        for (auto& [number, allocation] : allocations) {
            long offset = out.data - allocation.first[rank];
            if (number && 0 <= offset && offset < allocation.second) return number;
        }
        return 0;
    }

    bool send(const Move& move, long number, long depth, bool is_patient) {
        auto& out = move.outgoing;
        if (!out.n_bytes) return true;
        if (!is_taken({move.target, sent[move.target] - notes}, is_patient)) return false;
        if (long allocation = out.n_bytes < by_reference ? 0 : place(out, move.incoming)) {
            long offset = out.data - allocations[allocation].first[rank];
            referenced.push_back({number, tell(move.target, allocation, offset, out.n_bytes)});
            return true;
        }
        if (out.object != staged || number - staged_at >= depth) {
            if (out.n_bytes > slot_bytes) call(REFUSE_PART, out.n_bytes, slot_bytes);
            long slot = slots_used % slots;
            for (auto& message : in_slot[slot])
                if (!is_taken(message, is_patient)) return false;
            in_slot[slot].clear();
            memcpy(allocations[0].first[rank] + slot * slot_bytes, out.data, out.n_bytes);
            slots_used++, staged = out.object, staged_at = number, staged_slot = slot;
        }
        in_slot[staged_slot].push_back(tell(move.target, 0, staged_slot * slot_bytes, out.n_bytes));
        return true;
    }

    void receive(const Move& move) {
        long source = move.source, expected = move.incoming.n_bytes;
        if (!expected) return;
        wait(source, filled(rank), source);
        long* told = note(source, rank, received[source]++);
        if (told[2] != expected) refuse(source, told[2], expected);
        take_in(move, allocations[told[0]].first[source] + told[1]);
        post(source, taken_by(rank));
    }

    void await_references(long last) {
        for (; !referenced.empty() && referenced.front().first <= last; referenced.pop_front())
            is_taken(referenced.front().second, true);
    }

    void carry_out(const std::vector<Move>& moves, long depth) {
        long count = moves.size(), sent = 0;
        staged = nullptr;
        for (long number = 0; number < count; number++) {
            for (; sent <= number; sent++) send(moves[sent], sent, depth, true);
            while (sent < std::min(count, number + depth) && send(moves[sent], sent, depth, false)) sent++;
            await_references(number - depth);
            receive(moves[number]);
        }
        await_references(count);
    }

    // boards.py

    void show(const char* part, long n_bytes, long number) {
        char* own = board(rank, number);
        memcpy(own + LINE, part, n_bytes);
        words(own)[0] = number, words(own)[1] = n_bytes;
        meet(number);
        for (long other = 0; other < p; other++) {
            long* header = words(board(other, number));
            if (header[1] != n_bytes) refuse(other, header[1], n_bytes);
            if (header[0] != number) call(REFUSE_KIND, other, rank);
        }
    }

    void meet(long number) {
        wait(0, lock(), -1);
        long* arrived = words(mailboxes[0] + boards_at + 2 * (LINE + most_shown));
        bool is_last = arrived[0] + 1 == p;
        arrived[0] = is_last ? 0 : arrived[0] + 1;
        if (is_last) arrived[1] = rank, arrived[2] = number;
        post(0, lock());
        if (!is_last) return wait(rank, gate(), -1);
        for (long other = 0; other < p; other++)
            if (other != rank) post(other, gate());
    }

    // The sum of all boards, in the order of ranks: a block at a time, which stays in the nearest cache.
    void add_boards(char* to, long start, long stop, long number, int type, long divisor) {
        for (long at = start; at < stop; at += BLOCK_BYTES) {
            const char* sum = board(0, number) + LINE + at;
            for (long other = 1; other < p; other++, sum = to + at)
                COMBINE[type](to + at, sum, board(other, number) + LINE + at, std::min(BLOCK_BYTES, stop - at),
                              other == p - 1 ? divisor : 1);
        }
    }

    // From Python, by its own interface: pybind11's casts, cold, take an eighth of a message of 4 KiB.

    Vector read(PyObject* tensor) {
        Vector vector{tensor};
        if (tensor == Py_None) return vector;
        if (said(PyObject_CallMethodNoArgs(tensor, IS_CONTIGUOUS)).ptr() == Py_False)
            throw py::value_error("expected contiguous vectors to send and receive");
        vector.data = pointer(said(PyObject_CallMethodNoArgs(tensor, DATA_PTR)));
        vector.n_bytes = PyLong_AsLong(said(PyObject_GetAttr(tensor, NBYTES)).ptr());
        py::object dtype = said(PyObject_GetAttr(tensor, DTYPE));
        for (int type = 0; type < TYPES; type++)
            if (dtype.ptr() == PyTuple_GET_ITEM(types.ptr(), type)) vector.type = type;
        return vector;
    }

    Move read_step(py::handle step) {
        PyObject** of = PySequence_Fast_ITEMS(step.ptr());
        Move move{read(of[0]), read(of[2]), read(of[6]), PyLong_AsLong(of[1]), PyLong_AsLong(of[3]),
                  PyLong_AsLong(of[5]), of[4] == Py_True};
        if (PyErr_Occurred()) throw py::error_already_set();
        if (move.incoming.n_bytes && (move.is_added || move.divisor > 1)) check_type(move.incoming);
        return move;
    }

    void run(py::handle steps, long depth) {
        std::vector<Move> moves;
        for (py::handle step : py::reinterpret_borrow<py::list>(steps)) moves.push_back(read_step(step));
        outside([&] { moves.size() == 1 && is_swap(moves[0]) ? swap(moves[0]) : carry_out(moves, depth); });
    }

    // Show a part, and add up what of it lies between `start` and `stop`.
    void show_and_add(py::handle tensor, long number, long start, long stop, long divisor) {
        Vector part = read(tensor.ptr());
        if (start < stop) check_type(part);
        outside([&] {
            show(part.data, part.n_bytes, number);
            if (start < stop)
                add_boards(part.data, start * SIZE[part.type], stop * SIZE[part.type], number, part.type, divisor);
        });
    }

    // Memory of all ranks that messages may lie in from now on; no bytes: no more.
    void map(long number, const py::tuple& of_ranks, long n_bytes) {
        allocations[number] = {pointers(of_ranks), n_bytes};
        if (!n_bytes) allocations.erase(number);
    }
};

}  // namespace

PYBIND11_MODULE(core, module) {
    py::class_<Link>(module, "Link", py::module_local())
        .def(py::init<long, long, long, long, long, long, long, long, long, long, bool, py::tuple, py::tuple,
                      py::tuple>())
        .def("run", &Link::run)
        .def("show", &Link::show_and_add)
        .def("map", &Link::map);
}
