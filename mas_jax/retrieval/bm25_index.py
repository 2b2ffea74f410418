"""BM25 behind the same `search`: words instead of vectors, for comparison and small corpora.

The scores are those of the library bm25s (Lucene's form). Letters: N passages, R results.
Must not know: agents, models, jax.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.records import Passage, SearchFailure
from mas_jax.retrieval.index import Answer, IndexConfig, Retriever, contents


@dataclass(frozen=True)
class Bm25Config:
    """Saturation of a word's count, and how far long passages are discounted.

    Defaults: those of Pyserini's wiki baselines. Words: two letters or more, lower case, without
    English function words, not stemmed.
    """

    k1: float = 0.9
    b: float = 0.4


class Bm25Retriever(Retriever):
    """A corpus searched by BM25; batching, caching and answers as in `Retriever`.

    A passage that shares no word with the query is not a result, so there may be fewer than k.
    Raises: ValueError for an empty corpus, or without the package bm25s.
    """

    def __init__(self, passages: Sequence[Passage], config: Bm25Config) -> None:
        if not len(passages):
            raise ValueError("the corpus is empty: an index needs at least one passage")
        super().__init__(passages, None, IndexConfig(backend="exact"), ())
        if importlib.util.find_spec("bm25s") is None:
            raise ValueError("BM25 needs the package bm25s; pip install 'mas_jax[bm25]'")
        import bm25s

        self.fingerprint = f"bm25s-{bm25s.__version__}-{config.k1}-{config.b}"
        self._tokenize = bm25s.tokenize
        self._bm25 = bm25s.BM25(method="lucene", k1=config.k1, b=config.b)
        texts = [contents(passage) for passage in passages]
        self._bm25.index(self._words(texts), show_progress=False)
        self._vocabulary = set(self._bm25.vocab_dict)

    def _words(self, texts: Sequence[str]) -> list[list[str]]:
        return self._tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)

    def _search(self, texts: Sequence[str], k: int) -> list[Answer]:
        """Answers to distinct texts: score descending, ties to the earlier passage."""
        answers: list[Answer] = []
        for words in self._words(texts):
            if not words:
                answers.append(SearchFailure("empty_query", "the query holds no words to look for"))
                continue
            known = [word for word in words if word in self._vocabulary]
            scores_N = self._bm25.get_scores(known) if known else np.zeros(len(self.passages))
            rows_R = np.flatnonzero(scores_N > 0)
            if len(rows_R) > k:
                least = np.partition(scores_N[rows_R], len(rows_R) - k)[len(rows_R) - k]
                rows_R = rows_R[scores_N[rows_R] >= least]
            rows_R = rows_R[np.lexsort((rows_R, -scores_N[rows_R]))[:k]]
            answers.append(
                [
                    dataclasses.replace(self.passages[int(row)], score=float(scores_N[row]))
                    for row in rows_R
                ]
            )
        return answers
