"""Collaborators with Actors that they were not trained for: arguments, pairs, the matrix."""

import json

import pytest
from chat_server import ChatServer, answer
from rich.console import Console
from tiny_agentpo import save_both, small_config

from mas_jax.agents.math_oracle import MathFlaws, Player
from mas_jax.learning import transfer

QUIET = Console(quiet=True)


def test_an_argument_is_a_checkpoint_or_an_endpoint_and_perhaps_a_template():
    assert transfer.read_collaborators(["a=x/y", "b=z,smollm2"]) == {
        "a": {"model.checkpoint": "x/y"},
        "b": {"model.checkpoint": "z", "model.template": "smollm2"},
    }
    assert transfer.read_actors(["p=x,toy", "q=https://h:1/v1,some/model"]) == {
        "p": {"actor.kind": "policy", "actor.checkpoint": "x", "actor.template": "toy"},
        "q": {"actor.kind": "api", "actor.base_url": "https://h:1/v1", "actor.model": "some/model"},
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["x/y"], r"actor 'x/y': want NAME=CHECKPOINT"),
        (["a=x", "a=y"], r"actor 'a=y': want .* each NAME once"),
        (["alone=x"], "none 'alone', which is the Actor by itself"),
        (["a=http://h/v1"], "'a' is an endpoint without a model"),
        ([], "no actor is given"),
    ],
)
def test_an_argument_of_another_form_is_one_clear_error(texts, message):
    with pytest.raises(ValueError, match=message):
        transfer.read_actors(texts)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return save_both(tmp_path_factory.mktemp("policies"))


def served(reply):
    """An Actor that says to a toy problem and a hint what `reply` makes of the two."""

    def _reply(body):
        problem, _, hint = (
            body["messages"][-1]["content"].removeprefix(" solve ").partition(" with ")
        )
        return answer(reply(problem, hint))

    return ChatServer(_reply)


def right(problem, hint):
    return Player(MathFlaws(), 0).say([f" solve {problem}"], [])


def test_every_pair_is_evaluated_once_against_its_actor_alone(places, tmp_path):
    """One Actor is right once it is told anything at all, one always, hint or not."""
    with served(lambda p, h: right(p, h) if h else "no idea") as needy, served(right) as able:
        config = small_config(places, **{"actor.retries": 0, "evaluation.num_questions": 3})
        configs = transfer.make_configs(
            config,
            transfer.read_collaborators([f"one={places[0]}", f"two={places[1]}"]),
            transfer.read_actors([f"needy={needy.url},m", f"able={able.url},m"]),
        )
        matrix = transfer.run(configs, tmp_path, QUIET)
        num_asked = len(needy.bodies) + len(able.bodies)
        assert transfer.run(configs, tmp_path, QUIET) == matrix
        assert len(needy.bodies) + len(able.bodies) == num_asked  # from the records
    assert list(matrix) == ["needy", "able"]
    assert list(matrix["needy"]) == ["alone", "one", "two"]
    assert matrix["needy"]["alone"] == {
        "avg": {"difference": 0.0, "low": 0.0, "high": 0.0, "level": 0.95}, "less_alone": None,
    }  # fmt: skip
    for row in matrix["able"].values():
        assert row["avg"]["difference"] == 1.0
    assert matrix["able"]["two"]["less_alone"]["difference"] == 0.0
    gain = matrix["needy"]["one"]["less_alone"]["difference"]
    assert gain == matrix["needy"]["one"]["avg"]["difference"] > 0
    assert json.loads((tmp_path / "transfer.json").read_text()) == matrix
    header, _, *rows = (tmp_path / "transfer.md").read_text().split("\n\n")[1].splitlines()
    assert header == "| Collaborator | needy | able |"
    assert rows[0] == "| alone | 0.00 | 100.00 |"
    assert rows[2].endswith(r"| 100.00 +0.00 \[0.00, 0.00\] |")


def test_pairs_are_checked_before_any_plays(places, tmp_path):
    config = small_config(places)
    collaborators = transfer.read_collaborators([f"one={places[0]}"])
    with pytest.raises(ValueError, match=r"actor\.checkpoint='/nowhere' is not a directory"):
        actors = transfer.read_actors([f"a={places[1]}", "b=/nowhere"])
        transfer.make_configs(config, collaborators, actors)
    config.evaluation.teams = ("actor", "vote")
    with pytest.raises(ValueError, match="has no team of a Collaborator and an Actor"):
        transfer.make_configs(config, collaborators, transfer.read_actors([f"a={places[1]}"]))
