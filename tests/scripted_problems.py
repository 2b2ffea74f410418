"""Made-up problems with known answers, and solutions to them, for tests."""

from mas_jax.records import Problem


def make_problems(count: int) -> tuple[Problem, ...]:
    """Sums, of levels 1 to 5 in turn."""
    return tuple(
        Problem(
            uid=f"math/train/{number}", dataset="math", text=f"What is {number} + 1000?",
            golden_answers=(str(number + 1000),), level=number % 5 + 1, subject="Algebra",
        )
        for number in range(count)
    )  # fmt: skip


def says(problem: Problem, is_right: bool) -> str:
    """A solution with the right answer in its box, or a wrong one."""
    return f"I add. \\boxed{{{problem.golden_answers[0] if is_right else '7'}}}"
