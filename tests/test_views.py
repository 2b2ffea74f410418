"""The privileged branch: where a text stands, what the teacher reads, and what learns from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_team import CharTokenizer
from test_credit import ROW
from tiny_learning import (
    CONFIG,
    FORWARD,
    LENGTH,
    assert_bit_equal,
    largest_gap,
    make_params,
    make_traces,
    mesh,
    norm,
    scores_of,
)

from mas_jax.agents import chat
from mas_jax.agents.chat import Conversation
from mas_jax.learning import losses, update
from mas_jax.learning.batch import pack
from mas_jax.learning.objective import Exact, objective, own_counts, token_counts
from mas_jax.learning.programme import make_programme
from mas_jax.learning.views import View, insert, opening_end
from mas_jax.model import qwen3
from mas_jax.records import ROLES, Sample, StopReason, Trace

VIEW_LENGTH = 48
COEF = 0.3
DISTILLED = dataclasses.replace(
    ROW, advantages=(), divergence="reverse_kl", divergence_coef=COEF, teacher="live",
    view="privileged",
)  # fmt: skip
PROGRAMME = dict.fromkeys(ROLES, DISTILLED)
TEMPLATES = pytest.mark.parametrize("template", chat.TEMPLATES.values(), ids=chat.TEMPLATES)


# --- where the text stands ------------------------------------------------------------------------


def played(template, *, examples=(), thought=""):
    """The traces of a conversation of two turns under a template, with its chat."""
    talk = chat.make_chat(CharTokenizer(), template)
    conversation = Conversation(talk, "Who?", examples=examples)
    for said in (f"{thought}<search>a</search>", "<answer>b</answer>"):
        ids = tuple(talk.tokenizer.encode_template(said))
        conversation.append(
            Sample(ids, (-1.0,) * len(ids), StopReason.STRING), owner=2, action="search"
        )
        if said.endswith("</search>"):
            conversation.extend("Found.")
    return talk, [
        Trace(
            tuple(s.tokens), tuple(s.owners), tuple(s.logprobs), "q", 0, "searcher", "searcher",
            "p", tuple(s.turns),
        )
        for s in conversation.strands if s.turns
    ]  # fmt: skip


@TEMPLATES
@pytest.mark.parametrize("examples", [(), (("Like?", "<answer>this</answer>"),)])
def test_the_text_ends_the_users_turn_as_if_it_had_been_said_there(template, examples):
    """PITFALLS 86 and 88: inside the turn, by ids, with the same generation prefix behind it."""
    talk, traces = played(template, examples=examples)
    text = " It was Bob."
    whole = Conversation(talk, "Who?" + text, examples=examples).prompt()
    whole = whole[: len(whole) - len(talk.prefill)]  # the history shows none
    for trace in traces:
        view = insert(trace, talk.tokenizer.encode(text), talk, num_examples=len(examples))
        first = trace.turns[0].start
        assert view.tokens[: view.place(first)][: len(whole)] == whole
        assert view.tokens[view.at : view.at + view.size] == tuple(talk.tokenizer.encode(text))


@TEMPLATES
def test_every_sampled_token_keeps_its_id_and_what_stands_before_it(template):
    talk, traces = played(template, thought="<think>so</think>")
    for trace in traces:
        view = insert(trace, [7, 7, 7], talk)
        assert [view.tokens[view.place(t)] for t in range(len(trace.tokens))] == list(trace.tokens)
        for turn in trace.turns:
            for t in range(turn.start, turn.end):
                assert view.place(t) - view.place(t - 1) == 1


def test_a_trace_that_does_not_open_with_a_users_turn_is_an_error():
    talk, (trace,) = played(chat.INSTRUCT)
    with pytest.raises(ValueError, match="no user's turn stands after 8 messages"):
        opening_end(trace.tokens, talk, num_examples=4)
    with pytest.raises(ValueError, match="no user's turn stands after 0 messages"):
        opening_end(trace.tokens[trace.turns[-1].start :], talk, num_examples=0)
    with pytest.raises(ValueError, match="is num_examples=1 right"):
        insert(trace, [1], talk, num_examples=1)


# --- packing --------------------------------------------------------------------------------------


def view_at(trace: Trace, *, size: int, at: int = 1) -> View:
    """A text of `size` tokens that depend on the question, none of which a trace has."""
    ids = tuple(CONFIG.vocab_size - 1 - (i + hash_of(trace)) % 3 for i in range(size))
    return View((*trace.tokens[:at], *ids, *trace.tokens[at:]), at, size)


def hash_of(trace: Trace) -> int:
    return trace.rollout % 3


def shown(size: int, *, leave_out=()):
    return lambda trace: None if trace.rollout in leave_out else view_at(trace, size=size)


@functools.cache
def plain_traces(count: int = 24):
    """Traces that end in what was sampled and hold none of a text's tokens."""
    found = []
    for c in make_traces(count):
        tokens = tuple(token % (CONFIG.vocab_size - 4) for token in c.trace.tokens)
        found.append(dataclasses.replace(c, trace=dataclasses.replace(c.trace, tokens=tokens)))
    return found


def packed(view_of, credited=None, *, view_length=VIEW_LENGTH, rows=4, programme=PROGRAMME):
    return pack(
        credited or plain_traces(), programme, micro_rows=rows, length=LENGTH, agree=lambda n: n,
        view_of=view_of, view_length=view_length,
    )  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 20), st.integers(1, 24), st.integers(20, 60))
def test_every_view_stands_whole_beside_its_trace_and_no_trace_holds_its_text(
    size, count, view_length
):
    """PITFALLS 86: present in the teacher's row, absent from the student's, at every length."""
    credited = plain_traces(count)
    batch, _, stats = packed(shown(size), credited, view_length=view_length)
    fitting = [c.trace for c in credited if len(c.trace.tokens) + size <= view_length]
    assert stats.viewed_traces == len(fitting)
    assert stats.too_long_views == count - len(fitting)
    text = range(CONFIG.vocab_size - 3, CONFIG.vocab_size)
    assert not np.isin(batch.tokens_MBT, text).any()
    found = []
    for m, b in np.ndindex(batch.tokens_MBT.shape[:2]):
        for segment in range(1, batch.segment_ids_MBT[m, b].max() + 1):
            (at,) = np.nonzero(batch.segment_ids_MBT[m, b] == segment)
            (seen,) = np.nonzero(batch.view.segment_ids_MBS[m, b] == segment)
            trace = batch.tokens_MBT[m, b, at].tolist()
            assert seen.tolist() == list(range(seen[0], seen[0] + len(seen))) if len(seen) else True
            if not len(seen):
                assert not batch.view.weights_MBT[m, b, at].any()
                continue
            view = batch.view.tokens_MBS[m, b, seen].tolist()
            assert len(view) == len(trace) + size
            assert all(token in text for token in view[1 : 1 + size])
            place = batch.view.place_MBT[m, b, at]
            assert set(place) <= set(seen)
            assert batch.view.tokens_MBS[m, b, place].tolist() == trace
            found.append(tuple(trace))
    assert sorted(found) == sorted(trace.tokens for trace in fitting)


def test_a_trace_weighs_one_a_token_in_the_view_whatever_its_aggregation():
    by_sequence = dict.fromkeys(ROLES, dataclasses.replace(DISTILLED, aggregation="sequence"))
    credited = [*plain_traces(6), *plain_traces(6)]  # each twice
    batch, _, stats = packed(shown(4, leave_out=(1,)), credited, programme=by_sequence)
    assert stats.merged_traces == 6
    is_learned = batch.weights_MBT != 0
    weights = batch.view.weights_MBT
    assert set(np.unique(weights)) == {0.0, 2.0}
    owned = [sum(owner > 0 for owner in c.trace.owners[1:]) for c in plain_traces(6)]
    assert weights.sum() == 2 * (sum(owned) - owned[1])
    assert not weights[~is_learned].any()


def test_without_a_view_a_batch_is_what_it_was():
    args = dict(micro_rows=4, length=LENGTH, agree=lambda n: n)
    plain, num_micro, _ = pack(plain_traces(), PROGRAMME, **args)
    none, _, stats = packed(lambda trace: None)
    assert plain.view is None
    assert_bit_equal(plain, dataclasses.replace(none, view=None))
    assert (num_micro > 0, stats.viewed_traces, none.view.weights_MBT.any()) == (True, 0, False)


# --- the loss -------------------------------------------------------------------------------------


@functools.cache
def student():
    return make_params(0)


@functools.cache
def gradients(row, exact=("live",)):
    programme = dict.fromkeys(ROLES, row)
    return update.make_gradients(programme, FORWARD, mesh(), dict.fromkeys(exact, FORWARD))


def gradient(view_of, row=DISTILLED, *, exact=None, credited=None):
    """Gradient and metrics of every role with one row."""
    batch, num_micro, _ = packed(view_of, credited)
    weights = {role: jnp.float32(1.0) for role in ROLES}
    run = gradients(row, tuple(exact or ("live",)))
    return run(student(), batch, scores_of(), exact or {}, num_micro, weights)


def test_the_divergence_is_the_one_of_each_trace_and_view_alone():
    """Against whole distributions of unpacked rows, token by token."""
    view_of, total, count = shown(5, leave_out=(0, 4)), 0.0, 0

    @jax.jit
    def _rows(params, ids, segment_ids):
        hidden = qwen3.hidden(
            params, CONFIG, ids, segment_ids_BT=segment_ids, dtype=jnp.float32, remat="none",
            backend="auto",
        )  # fmt: skip
        return jax.nn.log_softmax(hidden[0] @ qwen3.unembedding(params, CONFIG).T)

    def _logits(tokens):
        row = np.zeros((2, 1, VIEW_LENGTH), np.int32)  # one shape, and so one program, for all
        row[:, 0, : len(tokens)] = tokens, (1,) * len(tokens)
        return np.asarray(_rows(student(), *row))

    for c in plain_traces():
        view = view_of(c.trace)
        if view is None:
            continue
        own, theirs = _logits(c.trace.tokens), _logits(view.tokens)
        for t in range(1, len(c.trace.tokens)):
            if c.trace.owners[t]:
                p, q = own[t - 1], theirs[view.place(t) - 1]
                total, count = total + float(np.sum(np.exp(p) * (p - q))), count + 1
    _, metrics = gradient(view_of)
    sums = [metrics[f"{role}/divergence"] for role in ROLES]
    assert sum(float(s[1]) for s in sums) == count
    assert sum(float(s[0]) for s in sums) == pytest.approx(total, rel=1e-5)
    assert sum(float(metrics[f"{role}/view_tokens"][0]) for role in ROLES) == count
    each = sum(float(s[0]) / float(s[1]) for s in sums if s[1] > 0)  # roles without a trace
    assert float(metrics["loss"][0]) == pytest.approx(COEF * each, rel=1e-5)


def test_another_text_gives_another_gradient_and_none_gives_none():
    """PITFALLS 64, 65: the teacher is in the gradient; 5.2 item 18."""
    one, other = gradient(shown(5))[0], gradient(shown(9))[0]
    assert largest_gap(one, other) > 1e-3 * norm(one) > 0
    empty, metrics = gradient(shown(0))
    assert norm(empty) < 1e-6 < norm(one)
    assert max(abs(float(metrics[f"{role}/divergence"][0])) for role in ROLES) < 1e-4


def test_no_gradient_reaches_the_privileged_branch():
    """The live teacher teaches as the same weights under another name, which are constants."""
    frozen = dataclasses.replace(DISTILLED, teacher="initial")
    live = gradient(shown(5))[0]
    assert_close(live, gradient(shown(5), frozen, exact={"initial": student()})[0])

    def _loss(theirs):
        batch, _, _ = packed(shown(5))
        micro = jax.tree.map(lambda x: x[0], batch)
        programme = dict.fromkeys(ROLES, frozen)
        counts = token_counts(programme, own_counts(programme, batch))
        weights = {role: jnp.float32(1.0) for role in ROLES}
        return objective(
            student(), programme, FORWARD, micro, scores_of(), {"initial": Exact(theirs, FORWARD)},
            counts, weights,
        )[0]  # fmt: skip

    value, found = jax.jit(jax.value_and_grad(_loss))(student())
    assert float(value) > 0
    assert norm(found) == 0.0


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_a_view_of_a_single_sampled_token_has_its_divergence(divergence):
    """PITFALLS 76: neither the first nor the last token of a response is lost."""
    (c, *_) = plain_traces()
    owners = (0, 0, 0, ROLES["leader"])
    trace = dataclasses.replace(c.trace, tokens=(1, 2, 3, 4), owners=owners, role="leader")
    row = dataclasses.replace(DISTILLED, divergence=divergence)
    _, metrics = gradient(shown(3), row, credited=[dataclasses.replace(c, trace=trace)])
    value, count = metrics["leader/divergence"]
    assert (float(count), float(value) > 0) == (1.0, True)


def test_the_policy_stream_counts_by_sequence_while_the_divergence_counts_tokens():
    row = dataclasses.replace(DISTILLED, advantages=("group",), aggregation="sequence")
    both = gradient(shown(5), row)[0]
    alone = gradient(shown(5), dataclasses.replace(row, advantages=()))[0]
    outcome = dataclasses.replace(row, divergence_coef=0.0, view="none")
    policy = gradient(None, outcome, exact={})[0]
    assert_close(both, jax.tree.map(jnp.add, alone, policy))


def assert_close(left, right):
    assert largest_gap(left, right) < 1e-6 + 1e-5 * norm(right)


# --- SDAR: a teacher that is not in the gradient --------------------------------------------------


def test_sdars_loss_by_hand():
    logprobs, teacher = jnp.log(jnp.asarray([[0.5, 0.2]])), jnp.log(jnp.asarray([[0.25, 0.4]]))
    mask = jnp.ones((1, 2), bool)
    found = losses.gated_log_ratio(logprobs, teacher, mask, slope=5.0)
    # d = -log 2 and log 2: gates 1 / (1 + 2^5) and its complement
    gate = 1 / 33
    np.testing.assert_allclose(found, np.log(2) * np.asarray([[-gate, 1 - gate]]), rtol=1e-5)


def test_without_its_gate_sdar_is_imitation_of_oneself():
    """PITFALLS 65: with slope 0 no text changes the gradient, with a gate only its weights."""
    row = dataclasses.replace(DISTILLED, divergence="gated_log_ratio", gate_slope=0.0)
    one, other = gradient(shown(5), row)[0], gradient(shown(9), row)[0]
    assert norm(one) > 0
    assert_close(one, other)
    gated = dataclasses.replace(row, gate_slope=5.0)
    assert largest_gap(gradient(shown(5), gated)[0], gradient(shown(9), gated)[0]) > 1e-4


# --- rows -----------------------------------------------------------------------------------------


def test_rows_with_a_view_are_checked():
    row = dataclasses.asdict(DISTILLED)
    assert make_programme({"searcher": row})["searcher"].is_viewed
    with pytest.raises(ValueError, match=r"live.*teaches nothing; set view='privileged'"):
        make_programme({"searcher": row | {"view": "none"}})
    with pytest.raises(ValueError, match="view='privileged' is of a divergence"):
        make_programme({"searcher": row | {"divergence": "none", "teacher": "initial"}})
