"""The wire formats that retrieval servers and clients speak: JSON values to queries and answers.

`POST /retrieve` takes `queries`, `query_list` or a single `query` with `topk` and `return_scores`
(Search-R1, verl, SkyRL); `POST /search` takes `questions` with `N` (M-ASK). A document's `contents`
are its title in double quotes, a line break and its text, as in the wiki-18 corpus.
Where a query failed its documents are an empty list, and the response says so beside them: a field
`errors` with null or "kind: message" for each query, in /search a field `error` of the item.
Clients that do not know these fields ignore them. Letters: Q queries of a request.
Must not know: HTTP, indexes, who asks.
"""

import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval.corpus import split_contents

DEFAULT_K = 3
IDENTITY_HEADER = "X-Index-Identity"  # of a response: which index answered
_QUERIES = ("queries", "query_list", "query")  # one of them holds what /retrieve is asked
_HALF_PAIR = re.compile("[\ud800-\udfff]")

Answer = list[Passage] | SearchFailure


@dataclass(frozen=True)
class Ask:
    """What a request asks for: k passages of each query, scores beside them or not."""

    queries_Q: tuple[str, ...]
    k: int
    scores: bool


# --- the server's side ----------------------------------------------------------------------------


def read_retrieve(fields: object) -> Ask:
    """The request of a /retrieve body; `topk` null or 0 means `DEFAULT_K`.

    Raises: ValueError that says what is wrong with it.
    """
    fields = _object(fields)
    given = [name for name in _QUERIES if fields.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"got {given or 'no queries'}, wanted exactly one of {list(_QUERIES)}")
    (name,) = given
    queries = [fields[name]] if name == "query" else fields[name]
    scores = fields.get("return_scores")
    if scores is not None and not isinstance(scores, bool):
        raise ValueError(f"return_scores={reprlib.repr(scores)}, wanted true, false or null")
    return Ask(_texts(name, queries), _count("topk", fields.get("topk")), bool(scores))


def read_search(fields: object) -> Ask:
    """The request of a /search body; `N` null or 0 means `DEFAULT_K`.

    Raises: ValueError that says what is wrong with it.
    """
    fields = _object(fields)
    if fields.get("questions") is None:
        raise ValueError("got no questions, wanted a list of strings under 'questions'")
    return Ask(_texts("questions", fields["questions"]), _count("N", fields.get("N")), False)


def write_retrieve(ask: Ask, answers_Q: Sequence[Answer]) -> dict[str, object]:
    """The /retrieve response: a list for each query, of documents with their scores or alone."""
    response: dict[str, object] = {
        "result": [
            [_scored(passage) if ask.scores else _document(passage) for passage in answer]
            for answer in map(_found, answers_Q)
        ]
    }
    if any(isinstance(answer, SearchFailure) for answer in answers_Q):
        response["errors"] = [_error(answer) for answer in answers_Q]
    return response


def write_search(ask: Ask, answers_Q: Sequence[Answer]) -> list[dict[str, object]]:
    """The /search response: an item for each question, its documents "title\\ntext"."""
    items = []
    for query, answer in zip(ask.queries_Q, answers_Q, strict=True):
        documents = [f"{passage.title}\n{passage.text}" for passage in _found(answer)]
        item: dict[str, object] = {"question": query, "top_k_docs": documents}
        if isinstance(answer, SearchFailure):
            item["error"] = _error(answer)
        items.append(item)
    return items


def _object(fields: object) -> Mapping[str, object]:
    if not isinstance(fields, dict):
        raise ValueError(f"the body is {reprlib.repr(fields)}, wanted a JSON object")
    return fields


def _texts(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{name}={reprlib.repr(values)}, wanted a list of strings")
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{name}[{place}]={reprlib.repr(value)}, wanted a string")
        if not is_text(value):
            raise ValueError(f"{name}[{place}] holds half of a surrogate pair; send whole ones")
    return tuple(values)


def _count(name: str, value: object) -> int:
    if value is None:
        return DEFAULT_K
    if type(value) is not int or value < 0:
        raise ValueError(
            f"{name}={reprlib.repr(value)}, wanted a positive integer, or null or 0 for {DEFAULT_K}"
        )
    return value or DEFAULT_K


def _found(answer: Answer) -> list[Passage]:
    return [] if isinstance(answer, SearchFailure) else answer


def _error(answer: Answer) -> str | None:
    return f"{answer.kind}: {answer.message}" if isinstance(answer, SearchFailure) else None


def _document(passage: Passage) -> dict[str, str]:
    document = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
    if "\n" in passage.title:  # contents do not tell where such a title ends
        document |= {"title": passage.title, "text": passage.text}
    return document


def _scored(passage: Passage) -> dict[str, object]:
    return {"document": _document(passage), "score": passage.score}


# --- the client's side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialect:
    """How a client asks one kind of server.

    path: of the URL. single: one query a request. write: (queries, k) -> the body. read: (body,
    queries, k) -> an answer for each query; raises ValueError for a body that is not one.
    """

    path: str
    single: bool
    write: Callable[[Sequence[str], int], dict[str, object]]
    read: Callable[[object, Sequence[str], int], list[Answer]]


def is_text(value: str) -> bool:
    """Whether a string has a UTF-8 form, which half of a surrogate pair has not."""
    return _HALF_PAIR.search(value) is None


def read_result(body: object, queries_Q: Sequence[str], k: int) -> list[Answer]:
    """Answers in a /retrieve response, each of the first k documents, scored or bare.

    A document is read from `title` and `text` if it has both, else from `contents`; one without an
    id gets a digest of what it says. Raises: ValueError that says what is wrong with the response.
    """
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list):
        raise ValueError(f"{reprlib.repr(body)}, wanted an object with a list under 'result'")
    if len(result) != len(queries_Q):
        raise ValueError(f"{len(result)} results for {len(queries_Q)} queries")
    errors = body.get("errors")
    if errors is None:
        errors = [None] * len(queries_Q)
    if not isinstance(errors, list) or len(errors) != len(queries_Q):
        raise ValueError(f"errors={reprlib.repr(errors)} for {len(queries_Q)} queries")
    return [
        _answer(items, error, k, _read_item) for items, error in zip(result, errors, strict=True)
    ]


def read_items(body: object, queries_Q: Sequence[str], k: int) -> list[Answer]:
    """Answers in a /search response. Its passages have no score, and a digest of what they say
    as id; double quotes around a title are taken off.

    Raises: ValueError that says what is wrong with the response.
    """
    if not isinstance(body, list) or not all(isinstance(item, dict) for item in body):
        raise ValueError(f"{reprlib.repr(body)}, wanted a list of objects")
    if [item.get("question") for item in body] != list(queries_Q):
        raise ValueError(f"{len(body)} items that are not those of the {len(queries_Q)} questions")
    return [
        _answer(item.get("top_k_docs"), item.get("error"), k, lambda text: _passage(text, None))
        for item in body
    ]


def _answer(items: object, error: object, k: int, read: Callable[[object], Passage]) -> Answer:
    if isinstance(error, str):
        kind, _, message = error.partition(": ")
        return (
            SearchFailure(kind, message) if kind.isidentifier() else SearchFailure("server", error)
        )
    if error is not None or not isinstance(items, list):
        raise ValueError(
            f"documents {reprlib.repr(items)}, error {reprlib.repr(error)}: wanted a list and null"
        )
    return [read(item) for item in items[:k]]  # search engines give more than they are asked for


def _read_item(item: object) -> Passage:
    """The passage of a scored document or of a bare one."""
    score = None
    if isinstance(item, dict) and "document" in item:
        item, score = item["document"], item.get("score")
    if not isinstance(item, dict):
        raise ValueError(f"document {reprlib.repr(item)}, wanted an object")
    if score is not None:
        if type(score) not in (int, float) or not math.isfinite(score):
            raise ValueError(f"score={reprlib.repr(score)}, wanted a finite number or null")
        score = float(score)
    title, text = item.get("title"), item.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        return _passage(item.get("contents"), score, item.get("id"))
    return Passage(_id(item.get("id"), title, text), title, text, score)


def _passage(contents: object, score: float | None, given: object = None) -> Passage:
    """The passage of a document's contents; double quotes around the title are taken off."""
    if not isinstance(contents, str):
        raise ValueError(f"contents={reprlib.repr(contents)}, wanted a string")
    title, text = split_contents(contents)
    return Passage(_id(given, title, text), title, text, score)


def _id(given: object, title: str, text: str) -> str:
    if type(given) in (str, int):
        return str(given)
    said = f"{title}\n{text}".encode("utf-8", "surrogatepass")
    return f"digest-{hashlib.blake2b(said, digest_size=8).hexdigest()}"


def _many(queries: Sequence[str], k: int) -> dict[str, object]:
    return {"queries": list(queries), "topk": k, "return_scores": True}


def _one(queries: Sequence[str], k: int) -> dict[str, object]:
    (query,) = queries
    return {"query": query, "topk": k, "return_scores": True}


def _questions(queries: Sequence[str], k: int) -> dict[str, object]:
    return {"questions": list(queries), "N": k}


# scores are always asked for: the first of these servers fails without them
DIALECTS = {
    "search-r1": Dialect("/retrieve", single=False, write=_many, read=read_result),
    "verl": Dialect("/retrieve", single=False, write=_many, read=read_result),
    "skyrl": Dialect("/retrieve", single=True, write=_one, read=read_result),
    "m-ask": Dialect("/search", single=False, write=_questions, read=read_items),
}
