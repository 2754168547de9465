"""`PagePool`: which page of a fixed pool holds which tokens. Bookkeeping only; the keys and values are elsewhere.

The cache of all sequences is one pool of pages of `page_size` tokens, as in vLLM (arXiv 2309.06180). A sequence holds a
`Lease`: its pages, in order. Pages are counted, so several leases may hold one:

* A *full* page whose tokens are computed is put in an index under its own tokens and those before it. Whoever begins
  with the same tokens takes the page instead of computing it again. The index compares the tokens themselves.
* A page that nobody holds keeps its place in the index until its room is needed: the one unused for longest goes first.
* Whoever writes to a page that is shared gets a copy of its own first.

That two sequences may share what was computed for one of them, to the bit, is the model's batch invariance.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, bytes]  # (the content before this page, by its number; this page's tokens)
NOTHING_BEFORE = 0


class PagePool:
    """`pages` pages of `page_size` tokens. share: whether sequences may take each other's full pages."""

    def __init__(self, pages: int, page_size: int, share: bool = True) -> None:
        self.pages, self.page_size, self.share = pages, page_size, share
        self._holders = [0] * pages
        self._blank = list(range(pages - 1, -1, -1))  # hold nothing
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the index, held by nobody; longest unused first
        self._index: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * pages
        self._contents = [NOTHING_BEFORE] * pages  # the number of an indexed page's content, never given twice
        self._last_content = NOTHING_BEFORE

    @property
    def available(self) -> int:
        """Pages that can be had now: blank ones, and those kept only because their tokens may come again."""
        return len(self._blank) + len(self._idle)

    @property
    def in_use(self) -> int:
        return self.pages - self.available

    @property
    def kept(self) -> int:
        """Pages that nobody holds but that still know their tokens."""
        return len(self._idle)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def open(self, ids: NDArray[np.int64]) -> Lease:
        """A lease for a sequence that begins with these tokens. It already holds the pages that are known."""
        lease = Lease(self)
        lease.adopt(ids)
        return lease

    def find(self, before: int, tokens: bytes) -> int | None:
        """The page that holds these tokens after that content."""
        return self._index.get((before, tokens))

    def content(self, page: int) -> int:
        return self._contents[page]

    def is_shared(self, page: int) -> bool:
        """Whether writing to it could be seen by anybody but its one holder."""
        return self._holders[page] > 1 or self._keys[page] is not None

    def hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def take(self) -> int:
        """A page to write to. There must be one `available`."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, before: int, tokens: bytes) -> int:
        """Put a full page in the index. -> that page, or the one that was there for the same tokens already."""
        known = self._index.setdefault((before, tokens), page)
        if known == page and self._keys[page] is None:
            self._last_content += 1
            self._keys[page], self._contents[page] = (before, tokens), self._last_content
        return known

    def forget_kept(self) -> None:
        """Empty the pages that nobody holds."""
        while self._idle:
            page, _ = self._idle.popitem()
            self._forget(page)
            self._blank.append(page)

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._index[key]
        self._keys[page], self._contents[page] = None, NOTHING_BEFORE

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise AssertionError unless the books balance. leases: all that are open."""
        held = Counter(page for lease in leases for page in lease.pages)
        for page, holders in enumerate(self._holders):
            assert holders == held[page], f"page {page}: {holders} holders noted, {held[page]} leases hold it"
        blank, idle = set(self._blank), set(self._idle)
        assert len(blank) == len(self._blank), "a page is blank twice"
        assert blank | idle | set(held) == set(range(self.pages)), "a page is lost"
        for one, other in ((blank, idle), (blank, set(held)), (idle, set(held))):
            assert not one & other, "a page is in two places"
        indexed = {page: key for page, key in enumerate(self._keys) if key is not None}
        assert {page: key for key, page in self._index.items()} == indexed, "the index and the pages disagree"
        assert not blank & set(indexed), "a blank page is in the index"
        assert idle <= set(indexed), "a page is kept for tokens that nobody can find"


class Lease:
    """The pages of one sequence, in order. `changed` is set when they are others than before; its reader clears it."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.published = 0  # of the pages, how many from the first are in the index
        self.changed = True

    def adopt(self, ids: NDArray[np.int64], computed: int | None = None) -> int:
        """Hold the known pages of a sequence that begins with these tokens, in place of computing them.

        computed: how many tokens are in the lease's own pages; adopting goes on only from the end of a page. At least
        the last token is left to compute, for its logits.   -> tokens that are there now
        """
        size, computed = self.pool.page_size, self.published * self.pool.page_size if computed is None else computed
        if not self.pool.share or computed != self.published * size:
            return computed
        while (self.published + 1) * size < len(ids):
            page = self.pool.find(*self._key(ids, self.published))
            if page is None:
                break
            self.pool.hold(page)
            if self.published < len(self.pages):  # one that was reserved for it
                self.pool.drop(self.pages[self.published])
                self.pages[self.published] = page
            else:
                self.pages.append(page)
            self.published += 1
            self.changed = True
        return self.published * size

    def next_key(self, ids: NDArray[np.int64], computed: int) -> Key | None:
        """What the page that is computed next will be found under; None for one that will not be found."""
        size = self.pool.page_size
        if not self.pool.share or computed != self.published * size or computed + size >= len(ids):
            return None
        return self._key(ids, self.published)

    def missing(self, start: int, stop: int) -> int:
        """Pages that `reserve` would take."""
        return max(0, self.pool.pages_for(stop) - len(self.pages)) + len(self._shared(start, stop))

    def reserve(self, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Make room to write tokens start to stop - 1. -> (page, its copy) of each page that has to be copied first.

        None, and nothing is changed, when the pool has too few pages.
        """
        shared = self._shared(start, stop)
        if stop <= len(self.pages) * self.pool.page_size and not shared:  # as for most tokens that are decoded
            return []
        if self.missing(start, stop) > self.pool.available:
            return None
        copies = []
        for place in shared:
            page = self.pool.take()
            copies.append((self.pages[place], page))
            self.pool.drop(self.pages[place])
            self.pages[place] = page
            self.published = min(self.published, place)
            self.changed = True
        while len(self.pages) < self.pool.pages_for(stop):
            self.pages.append(self.pool.take())
            self.changed = True
        return copies

    def commit(self, ids: NDArray[np.int64], computed: int) -> None:
        """The first `computed` of these tokens are in the pages now. A page that another sequence has computed in the
        meantime takes the place of this one's: they are equal."""
        if not self.pool.share:
            return
        while (self.published + 1) * self.pool.page_size <= computed:
            page = self.pages[self.published]
            known = self.pool.publish(page, *self._key(ids, self.published))
            if known != page:
                self.pool.hold(known)
                self.pool.drop(page)
                self.pages[self.published] = known
                self.changed = True
            self.published += 1

    def fork(self) -> Lease:
        """Another lease of the same pages."""
        other = Lease(self.pool)
        other.pages, other.published = list(self.pages), self.published
        for page in other.pages:
            self.pool.hold(page)
        return other

    def close(self) -> None:
        """Give the pages back; the last first, so that of a kept sequence the end goes before the beginning."""
        while self.pages:
            self.pool.drop(self.pages.pop())
        self.published, self.changed = 0, True

    def _key(self, ids: NDArray[np.int64], place: int) -> Key:
        size = self.pool.page_size
        before = self.pool.content(self.pages[place - 1]) if place else NOTHING_BEFORE
        return before, ids[place * size : (place + 1) * size].tobytes()

    def _shared(self, start: int, stop: int) -> list[int]:
        """Places of the pages that hold tokens start to stop - 1 and that this lease may not write to."""
        first, last = start // self.pool.page_size, min(len(self.pages), self.pool.pages_for(stop))
        return [place for place in range(first, last) if self.pool.is_shared(self.pages[place])]
