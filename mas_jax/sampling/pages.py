"""Books of a paged key/value pool: which page is free, who uses it, which prefix it holds.

A page holds the keys and values of `page_size` consecutive positions. A full page of a prompt is
known by a digest of the policy's version and of every token up to its end, so that any request with
the same beginning shares it; a page that nobody uses stays findable until its space is needed.
Page 0 belongs to nobody: device calls write there what is not wanted.
Must not know: devices, models, requests.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

TRASH = 0


def prefix_digests(version: str, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """A digest of each full page of `tokens` that depends on everything before it, in order."""
    digest = hashlib.blake2b(version.encode(), digest_size=16).digest()
    array = np.asarray(tokens, np.int32)
    digests = []
    for start in range(0, len(array) - page_size + 1, page_size):
        page_bytes = array[start : start + page_size].tobytes()
        digest = hashlib.blake2b(digest + page_bytes, digest_size=16).digest()
        digests.append(digest)
    return digests


class PagePool:
    """Reference counts of `num_pages` pages and the prefixes they hold.

    Raises: ValueError for fewer than two pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: a pool needs page 0 and at least one more")
        self.num_pages = num_pages
        self._free = deque(range(1, num_pages))
        self._users = [0] * num_pages
        self._digest: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # findable pages, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could still hand out."""
        return len(self._free) + len(self._unused)

    def allocate(self) -> int | None:
        """A page with one user and no prefix; the longest unused prefix goes if none is free."""
        if self._free:
            page = self._free.popleft()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._users[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        """The page that holds a prefix, with one user more; None if no page does."""
        page = self._page_of.get(digest)
        if page is not None:
            self._users[page] += 1
            self._unused.pop(page, None)
        return page

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a page findable, unless another page holds the same prefix already.

        Raises: ValueError if the page holds a prefix.
        """
        if self._digest[page] is not None:
            raise ValueError(f"page {page} holds a prefix already; withdraw it first")
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest[page] = digest

    def is_used(self, page: int) -> bool:
        """True while somebody holds the page."""
        return self._users[page] > 0

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page, last to first: the ends of prefixes are given up first."""
        for page in reversed(pages):
            if self._users[page] <= 0:
                raise ValueError(f"page {page} has no user to release")
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._digest[page] is None:
                    self._free.append(page)
                else:
                    self._unused[page] = None

    def withdraw(self, page: int) -> None:
        """Makes a page unfindable; if nobody uses it, it is free."""
        if self._digest[page] is not None:
            self._forget(page)
            if page in self._unused:
                del self._unused[page]
                self._free.append(page)

    def withdraw_all(self) -> None:
        """Makes every page unfindable: what the pool holds is no longer true."""
        for page in list(self._page_of.values()):
            self.withdraw(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest[page]]
        self._digest[page] = None
