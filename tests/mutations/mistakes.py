"""All mistakes: those that a change makes, as a contribution left out, a wrong sign, an off-by-one, a missing wait."""

from tests.mutations import of_answers, of_nn, of_parallel

MISTAKES = [*of_nn.MISTAKES, *of_parallel.MISTAKES, *of_answers.MISTAKES]
