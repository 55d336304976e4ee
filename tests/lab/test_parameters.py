"""Parameters of a notebook, a report and papermill: each is checked, none is lost."""

from unittest.mock import Mock

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_notebook

from labkit.lab.config import ParameterError
from labkit.lab.notebook import open_lab
from labkit.lab.parameters import literal_assignments, report_parameters
from labkit.lab.user_checks import verdicts
from labkit.studies import load_lab
from tests.pages.cells import recorded

STUDY = load_lab("all_reduce")


@pytest.fixture
def shell(monkeypatch):
    """Run cells as a kernel runs them, with their history; return its namespace after each."""
    shell = InteractiveShell()
    monkeypatch.setattr("labkit.lab.notebook.get_ipython", lambda: shell)
    shell.user_ns |= {"open_lab": open_lab, "study": STUDY}

    def run(*cells):
        for cell in cells:
            shell.run_cell(cell, store_history=True, silent=False).raise_error()
        return shell.user_ns

    yield run
    shell.history_manager.end_session()


CELL = 'profile = "quick"\nrepeats = None\nconfig = {}'
OPEN = "lab = open_lab(study, profile=profile, repeats=repeats, config=config)"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"repaets": 7}, r"unknown parameter 'repaets' \(did you mean 'repeats'\?\)"),
        ({"config": {"repaets": 7}}, r"unknown parameter 'repaets' \(did you mean 'repeats'\?\)"),
        ({"repeats": 7, "config": {"repeats": 8}}, "'repeats' is set twice"),
        ({"config": {"profile": "quick"}}, "'config' should hold others by name"),
        ({"config": 3}, "'config' should hold others by name"),
        ({"dtype": "fp64"}, "parameter 'dtype'"),
        ({"run": 20261123}, "'run' should be the path of a run"),
        ({"study": 1}, "unknown parameter 'study'"),
        ({"profile": None}, "unknown profile"),
    ],
)
def test_a_wrong_parameter_is_refused(parameters, expected):
    with pytest.raises(ParameterError, match=expected):
        open_lab(STUDY, **{"profile": "smoke"} | parameters)


def test_a_config_is_validated_once(monkeypatch):
    validated = []
    monkeypatch.setattr(
        STUDY.config, "model_validate", lambda values: validated.append(values) or Mock()
    )
    open_lab(STUDY, profile="smoke", repeats=7)
    assert len(validated) == 1


def test_a_lab_with_some_parameters_changed_keeps_the_others():
    lab = open_lab(STUDY, profile="smoke", repeats=7)
    other = lab.but(dtype="float64")
    assert (other.config.repeats, other.config.dtype) == (7, "float64")
    assert lab.config.dtype == STUDY.profiles["smoke"].dtype
    with pytest.raises(ParameterError, match="did you mean 'repeats'"):
        lab.but(repaets=8)


def test_a_parameter_counts_whatever_stands_in_its_cell_and_wherever_it_is_set(shell, capsys):
    namespace = shell(f'%%time\n{CELL}\nprofile = "smoke"', "repeats = 7", f"%%capture out\n{OPEN}")
    assert namespace["lab"].config.repeats == 7
    assert shell("repeats = 8", OPEN)["lab"].config.repeats == 8


def test_papermill_s_values_win_over_the_defaults(shell):
    lab = shell(CELL, '# Parameters\nprofile = "smoke"\nrepeats = 7\n', OPEN)["lab"]
    assert (lab.parameters.profile, lab.config.repeats) == ("smoke", 7)


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        ('profil = "smoke"', r"unknown parameter 'profil' \(did you mean 'profile'\?\)"),
        ("warmup = float('nan')", "pass it to papermill as -y 'config: {warmup: ...}'"),
    ],
)
def test_what_papermill_sets_in_vain_is_refused(passed, expected, shell):
    with pytest.raises(ParameterError, match=expected):
        shell(CELL, f"# Parameters\n{passed}\n", OPEN)
    # mended in a later run of the cell: the first one is still in the history
    assert shell(CELL, "# Parameters\nrepeats = 7\n", OPEN)["lab"].config.repeats == 7


@pytest.mark.parametrize("injected", ['profile = "smoke"', "repeats = 7"])
def test_papermill_s_values_above_the_parameters_cell_are_not_lost(injected, shell):
    """As papermill puts them in a notebook whose parameters cell lost its tag."""
    with pytest.raises(ParameterError, match="tag that one `parameters`"):
        shell(f"# Parameters\n{injected}\n", "import math", CELL, OPEN)


def test_papermill_s_values_in_a_notebook_of_few_parameters_are_not_lost(shell):
    opened = "lab = open_lab(study, profile=profile, repeats=5)"
    with pytest.raises(ParameterError, match="'profile'"):
        shell('# Parameters\nprofile = "smoke"\n', 'profile = "quick"', opened)


def test_a_parameter_that_papermill_did_not_set_overwrites_nothing(shell):
    opened = "lab = open_lab(study, profile='smoke', repeats=repeats)"
    assert shell("# Parameters\nrepeats = 7\n", "import math", opened)["lab"].config.repeats == 7


def test_a_cell_that_a_reader_calls_parameters_is_not_taken_for_papermill_s(shell):
    for repeats in (7, 8):
        namespace = shell(f"# Parameters\n{CELL}\nrepeats = {repeats}", OPEN)
        assert namespace["lab"].config.repeats == repeats


def test_literals_are_read_beside_lines_that_set_nothing():
    cell = (
        '"""Which."""\nimport math\n%matplotlib inline\nprofile = "smoke"\nrepeats: int ='
        " 7\nprint(profile)"
    )
    assert literal_assignments(cell) == {"profile": "smoke", "repeats": 7}
    with pytest.raises(ValueError, match="malformed"):
        literal_assignments('profile = "smoke"\nrepeats = len(profile)')


def test_a_report_s_values_win_over_the_config_of_a_notebook():
    cell = new_code_cell(
        'profile = "smoke"\nconfig = {"repeats": 7, "warmup": 0}', metadata={"tags": ["parameters"]}
    )
    text = nbformat.writes(new_notebook(cells=[cell]))
    values, config = report_parameters(STUDY, text, {"repeats": 8})
    assert values == {"config": {"repeats": 8, "warmup": 0}}
    assert config.repeats == 8
    with pytest.raises(ParameterError, match="set twice"):
        report_parameters(STUDY, text, {"repeats": 8, "config": {"repeats": 9}})
    for wrong in ({"repaets": 8}, {"config": {"repaets": 8}}):
        with pytest.raises(ParameterError, match="did you mean 'repeats'"):
            report_parameters(STUDY, text, wrong)


@pytest.mark.parametrize(
    ("lab", "name"),
    [("model_parallel", "pipeline"), ("context_parallel", "ring, zigzag"), ("limits", "gloo")],
)
def test_a_verdict_names_the_way_axis_or_schedule(lab, name):
    run = recorded(lab)
    names = {one.name for one in verdicts(load_lab(lab), run)}
    assert name in names
    assert not names & set(run.header.planned)
