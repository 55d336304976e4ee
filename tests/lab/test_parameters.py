"""Parameters cells as readers write them: every name they set is checked, and nothing that is set
is ignored."""

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_notebook

from labkit.lab.config import ParameterError
from labkit.lab.notebook import open_lab
from labkit.lab.pages.execute import join_parameters
from labkit.lab.parameters import literal_assignments, read_parameters
from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.lab.user_checks import verdicts
from labkit.studies import load_lab

STUDY = load_lab("all_reduce")


@pytest.fixture
def shell():
    """Cells run as a kernel runs them, with their history; returns its namespace after each."""
    shell = InteractiveShell()
    shell.user_ns |= {"open_lab": open_lab, "study": STUDY}

    def run(*cells):
        for cell in cells:
            shell.run_cell(cell, store_history=True, silent=False)
        return shell.user_ns

    yield run
    shell.history_manager.end_session()


BESIDE = {
    "print": 'print("measuring")',
    "docstring": '"""What to measure."""',
    "magic": "%pwd",
    "condition": "if True:\n    warmup = 1",
    "function": "def helper():\n    inside = 1",
    "loop in a value": "sizes_bytes = [8 * n for n in (1, 2)]",
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_parameters_cell_may_hold_other_lines(beside, shell, capsys):
    namespace = shell(f'{beside}\nprofile = "smoke"\nrepeats = 7')
    assert open_lab(STUDY, namespace).config.repeats == 7
    shell(f'{beside}\nprofile = "smoke"\nrepeats = 8')
    assert open_lab(STUDY, namespace).config.repeats == 8
    shell(f'{beside}\nprofile = "smoke"\nrepaets = 9')
    with pytest.raises(
        ParameterError, match=r"unknown parameter 'repaets' \(did you mean 'repeats'\?\)"
    ):
        open_lab(STUDY, namespace)
    shell('profile = "smoke"')  # mended: what was mistyped before is no parameter any more
    assert open_lab(STUDY, namespace).config.repeats == STUDY.profiles["smoke"].repeats


def test_a_cell_magic_around_the_parameters_hides_none(shell, capsys):
    assert open_lab(STUDY, shell('%%time\nprofile = "smoke"\nrepeats = 7')).config.repeats == 7


def test_what_follows_the_opening_of_a_lab_in_one_cell_is_no_parameter(shell):
    cell = 'profile = "smoke"\nlab = open_lab(study, globals())\nfigure = lab.config.repeats'
    assert shell(cell, cell)["figure"] == STUDY.profiles["smoke"].repeats


def test_a_parameter_that_a_later_cell_sets_counts_and_other_variables_do_not(shell):
    namespace = shell(
        'profile = "smoke"\nrepeats = 7',
        'mine = 1\ndtype = "float64"\nlab = open_lab(study, globals())',
    )
    assert namespace["lab"].config.dtype == "float64"
    shell('dtype = "fp64"')
    with pytest.raises(ParameterError, match="parameter 'dtype'"):
        open_lab(STUDY, namespace)


def test_a_cell_that_a_reader_calls_parameters_is_not_taken_for_the_one_of_papermill(shell):
    for repeats in (7, 8):
        namespace = shell(f'# Parameters\nprofile = "smoke"\nrepeats = {repeats}')
        assert open_lab(STUDY, namespace).config.repeats == repeats


def test_the_cell_that_papermill_adds_stands_in_for_the_defaults(shell):
    namespace = shell(
        'profile = "quick"\nrepeats = None', '# Parameters\nprofile = "smoke"\nrepeats = 7\n'
    )
    lab = open_lab(STUDY, namespace)
    assert (lab.parameters.profile, lab.config.repeats) == ("smoke", 7)
    with pytest.raises(
        ParameterError, match=r"unknown parameter 'wrold_sizes' \(did you mean 'world_sizes'\?\)"
    ):
        open_lab(STUDY, shell('profile = "quick"', "# Parameters\nwrold_sizes = [2]\n"))


def test_config_holds_any_other_parameter_by_name(shell):
    namespace = shell('profile: str = "smoke"\nconfig: dict = {"repeats": 7, "dtype": "float64"}')
    config = open_lab(STUDY, namespace).config
    assert (config.repeats, config.dtype) == (7, "float64")
    for cell, expected in {
        'config = {"repaets": 7}': r"unknown parameter 'repaets' \(did you mean 'repeats'\?\)",
        'repeats = 7\nconfig = {"repeats": 8}': "'repeats' is set twice",
        'config = {"profile": "quick"}': "'config' should hold others by name",
        "config = 3": "'config' should hold others by name",
    }.items():
        shell(f'profile = "smoke"\n{cell}')
        with pytest.raises(ParameterError, match=expected):
            open_lab(STUDY, namespace)
    shell(
        'profile = "smoke"\nrepeats = None\nconfig = {"repeats": 8}',
        '# Parameters\nconfig = {"repeats": 9}',
    )
    assert open_lab(STUDY, namespace).config.repeats == 9


def test_values_that_papermill_has_put_above_the_parameters_cell_are_not_lost(shell):
    """As it does in a notebook whose parameters cell lost its tag."""
    for injected in ('profile = "smoke"', "repeats = 7"):
        cells = f"# Parameters\n{injected}\n", "import math", 'profile = "quick"\nrepeats = None'
        namespace = shell("%reset -f", *cells)
        with pytest.raises(ParameterError, match="tag it `parameters`"):
            open_lab(STUDY, namespace)


def test_a_script_has_no_cells():
    values = {"profile": "smoke", "repeats": 7}
    assert read_parameters(STUDY, values | {"mine": 1}) == values
    with pytest.raises(ParameterError, match="parameters cell first"):
        read_parameters(STUDY, {"repeats": 7})


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
    assert join_parameters(STUDY, text, {"repeats": 8}) == {"config": {"repeats": 8, "warmup": 0}}
    with pytest.raises(ParameterError, match="set twice"):
        join_parameters(STUDY, text, {"repeats": 8, "config": {"repeats": 9}})


@pytest.mark.parametrize(
    ("lab", "name"),
    [("model_parallel", "pipeline"), ("context_parallel", "ring, zigzag"), ("limits", "gloo")],
)
def test_a_verdict_names_the_way_axis_or_schedule(lab, name):
    (path,) = (recorded_directory() / lab).glob("*.jsonl")
    run = Run.load(path)
    names = {one.name for one in verdicts(load_lab(lab), run)}
    assert name in names
    assert not names & set(run.header.planned)
