"""The index over effects: the largest first, those of other machines left out, and where each stands on the axis."""

import math
from dataclasses import asdict

from labkit.lab.findings import Claim, Effect, Finding, Question
from labkit.lab.pages.effects import all_effects, largest
from labkit.lab.pages.importance import by_importance

NAN = math.nan


def effect(ratio, low, high, verdict, setting="here", subject="ring", quantity="time"):
    return Effect(subject, "torch", setting, quantity, ratio, low, high, verdict)


def _verdict(effects):
    return "no" if {effect.verdict for effect in effects} == {"slower"} else "yes"


def lab(*of_questions, elsewhere=False):
    answers = [
        {"question": asdict(Question(f"q{number}", "Which?"))}
        | Finding(
            _verdict(effects), f"The ring, {number}.", effects=tuple(effects), lead=effects[0], where="of 2 ranks"
        ).record()
        for number, effects in enumerate(of_questions)
    ]
    record = {"elsewhere": elsewhere, "answers": answers}
    return {"title": "Lab", "page": "lab.html", "record": record, "answers": by_importance(answers)}


def test_the_largest_differences_are_those_that_headlines_quote():
    wide = effect(0.05, 0.01, 0.9, "faster")  # perhaps twenty times, perhaps a tenth
    sure = effect(0.25, 0.2, 0.3, "faster")
    slower = effect(2.0, 1.9, 2.1, "slower")
    small = effect(1.2, 1.1, 1.3, "slower", quantity="memory")
    found = largest([lab([wide], [sure, wide], [slower], [small])])
    assert [(one["factor"], one["words"], one["headline"]) for one in found] == [
        ("4.0×", "faster", "The ring, 1."),
        ("2.0×", "slower", "The ring, 2."),
        ("20 %", "more memory", "The ring, 3."),
        ("≥ 10 %", "less time", "The ring, 0."),  # too uneven to be quoted
    ]
    assert (found[0]["where"], found[0]["href"]) == ("of 2 ranks", "lab.html#answer-q1")


def test_the_size_of_a_difference_says_whether_it_is_the_largest_and_what_the_other_way_is():
    large, small = effect(0.25, 0.2, 0.3, "faster"), effect(0.8, 0.7, 0.9, "faster")
    slower, other = effect(1.3, 1.2, 1.4, "slower"), effect(9.0, 8.0, 10.0, "slower", subject="tree")

    def told(*effects):
        (one,) = lab(effects)["answers"]
        return one["of"], one["factor"], one["words"], one["against"]

    assert told(large, small, other) == ("up to", "4.0×", "faster", "")
    assert told(small, large) == ("typically", "20 %", "less time", "")
    perhaps = effect(0.5, 0.3, 1.05, "faster")  # its interval reaches over 1
    assert told(perhaps)[1] == ""
    assert told(large, slower) == ("", "4.0×", "faster", "30 % longer")


def test_there_are_five_of_them_and_none_of_another_machine():
    sure = effect(0.5, 0.4, 0.6, "faster", quantity="memory")
    assert [one["words"] for one in largest([lab(*[[sure]] * 9)])] == ["less memory"] * 5
    assert largest([lab([sure], elsewhere=True)]) == []
    assert all_effects([lab([sure], elsewhere=True), {"record": None}])[0] == []


def test_a_page_begins_with_its_largest_difference_and_ends_with_what_others_claim():
    large, small = effect(0.1, 0.09, 0.11, "faster"), effect(0.8, 0.7, 0.9, "faster")
    of = {"effects": (large,), "lead": large}
    answers = {
        "claims": Finding("yes", "One holds.", claims=(Claim("a", "holds here"),)),
        "nothing": Finding("no clear difference", "No clear difference.", effects=(large,)),
        "number": Finding("measured", "It takes 2 s."),
        "lost": Finding("not measured", "Not measured."),
        "small": Finding("yes", "A little faster.", effects=(small,), lead=small),
        "large": Finding("yes", "Faster.", **of),
    }
    records = [{"question": {"id": name}} | finding.record() for name, finding in answers.items()]
    ordered = [answer["question"]["id"] for answer in by_importance(records)]
    assert ordered == ["large", "small", "number", "nothing", "claims", "lost"]


def test_of_two_settings_in_the_middle_the_one_nearer_to_1_stands_for_both():
    both = [effect(ratio, ratio, ratio, "slower") for ratio in (1.02, 1.44)]
    (row,), _ = all_effects([lab(both)])
    assert row.value == "1.02"


def test_all_differences_have_a_row_the_fastest_first_on_one_axis():
    ring = [effect(ratio, ratio / 1.1, ratio * 1.1, "slower", subject="ring") for ratio in (1.0, 2.0, 4.0)]
    tree = [effect(0.25, NAN, NAN, "too few repeats", subject="tree")]
    rows, ticks = all_effects([lab(ring, tree)])
    assert [(row.subject, row.value, row.interval, row.lab) for row in rows] == [
        ("tree", "0.25", "", "Lab"),
        ("ring", "2.00", "[1.82, 2.20]", "Lab"),
    ]
    assert rows[0].low == rows[0].place == rows[0].high == 0
    assert rows[1].low < rows[1].place < rows[1].high <= 100
    assert len(rows[1].others) == 2
    uneven = all_effects([lab([effect(1.04, 0.65, 1.65, "no difference shown")])])[0]
    assert [(row.value, row.interval) for row in uneven] == [("", "[0.65, 1.65]")]
    places = {text: place for place, text in ticks}
    assert places["1/4"] == 0
    assert places["1"] in rows[1].others
    assert places["2"] == rows[1].place


def test_what_two_questions_ask_of_one_setting_has_one_row():
    asked, again = effect(0.5, 0.4, 0.6, "faster"), effect(0.51, 0.4, 0.6, "faster")
    elsewhere = effect(0.9, 0.8, 1.0, "no difference shown", setting="1 MiB")
    (row,) = all_effects([lab([asked], [again, elsewhere])])[0]
    assert row.href.endswith("q1")
    assert len(row.others) == 1
