"""A table that is made once for several answers: only while frames do not change, of its own frame, for each a copy."""

import pandas as pd

from labkit.lab.made_once import made_once, unchanged_frames


def _counted():
    asked = []

    @made_once
    def table(frame):
        asked.append(frame)
        return frame * 2

    return table, asked


def test_a_frame_that_may_change_is_looked_at_each_time():
    table, asked = _counted()
    frame = pd.DataFrame({"x": [1]})
    table(frame)
    frame["x"] = 5
    assert table(frame)["x"].tolist() == [10]
    assert len(asked) == 2


def test_of_a_frame_that_does_not_change_a_table_is_made_once_and_nobody_changes_anothers():
    table, asked = _counted()
    frame, other = pd.DataFrame({"x": [1]}), pd.DataFrame({"x": [7]})
    with unchanged_frames():
        mine = table(frame)
        mine["x"] = 0
        assert table(frame)["x"].tolist() == [2]
        assert table(other)["x"].tolist() == [14]
    assert len(asked) == 2
    with unchanged_frames():
        table(frame)
    assert len(asked) == 3
