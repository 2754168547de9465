"""`PagePool`: which page of a fixed pool holds which tokens. Bookkeeping only; the cache holds the keys and values.

The cache of all sequences is one pool of pages of `page_size` tokens, as in vLLM (arXiv 2309.06180). A sequence holds a
`Lease`: its pages, in order. Several leases may hold one page, which counts them:

* A *full* page of computed tokens is indexed by its tokens and those before it, and by the adapter that computed it. A
  sequence that begins with the same tokens takes the page instead of computing it. The index compares the tokens
  themselves, not hashes; of an adapter the hash of its numbers.
* A page without holders stays in the index until its space is needed; the one unused for longest goes first.
* A sequence that writes to a shared page gets its own copy first.

By the model's batch invariance a shared page holds, to the bit, what each of its sequences would have computed.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Key = tuple[int | str, bytes]  # (number of the content before this page, or the adapter's digest; this page's tokens)
NOTHING_BEFORE = 0


class PagePool:
    """`pages` pages of `page_size` tokens. share: whether sequences may share full pages. complete: whether pages are
    all that is kept of a sequence; not where layers have a state that belongs to its slot, and is lost with it."""

    def __init__(self, pages: int, page_size: int, share: bool = True, complete: bool = True) -> None:
        self.pages, self.page_size, self.share, self.complete = pages, page_size, share and complete, complete
        self._holders = [0] * pages
        self._blank = list(range(pages - 1, -1, -1))  # not indexed, no holders
        self._idle: OrderedDict[int, None] = OrderedDict()  # indexed, no holders; longest unused first
        self.index: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * pages
        self.contents = [NOTHING_BEFORE] * pages  # the unique number of an indexed page's content
        self._last_content = NOTHING_BEFORE

    @property
    def available(self) -> int:
        """Pages without holders."""
        return len(self._blank) + len(self._idle)

    @property
    def in_use(self) -> int:
        return self.pages - self.available

    def holders(self) -> list[int | None]:
        """As `Engine.page_holders`; any thread may ask."""
        return [
            count if count or key is not None else None for count, key in zip(self._holders, self._keys, strict=True)
        ]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def open(self, ids: NDArray[np.int64], computes_all: bool = False, adapter: str = "") -> Lease:
        """A lease for a sequence that begins with these tokens. It already holds the indexed pages, unless it has to
        compute all of its tokens itself. adapter: the digest of the sequence's; others' pages are not its."""
        lease = Lease(self, computes_all, adapter)
        lease.adopt(ids)
        return lease

    def is_shared(self, page: int) -> bool:
        """Whether more than one sequence holds the page or may come to hold it."""
        return self._holders[page] > 1 or self._keys[page] is not None

    def hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def take(self) -> int:
        """A page to write to. At least one must be `available`."""
        page = self._blank.pop() if self._blank else self._forget_idle(last=False)
        self._holders[page] = 1
        return page

    def drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._keys[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: Key) -> int:
        """Index a full page. -> that page, or the one that was indexed with this key before."""
        known = self.index.setdefault(key, page)
        if known == page and self._keys[page] is None:
            self._last_content += 1
            self._keys[page], self.contents[page] = key, self._last_content
        return known

    def clear_idle(self) -> None:
        """Remove all pages without holders from the index."""
        while self._idle:
            self._blank.append(self._forget_idle(last=True))

    def _forget_idle(self, last: bool) -> int:
        page, _ = self._idle.popitem(last=last)
        key = self._keys[page]
        assert key is not None
        del self.index[key]
        self._keys[page], self.contents[page] = None, NOTHING_BEFORE
        return page


class Lease:
    """The pages of one sequence, in order. `changed` is set when they change; the reader clears it."""

    def __init__(self, pool: PagePool, computes_all: bool = False, adapter: str = "") -> None:
        self.adapter = adapter
        self.pool, self.adopts = pool, pool.share and not computes_all
        self.pages: list[int] = []
        self.published = 0  # the first pages, as many as are indexed
        self.changed = True

    def adopt(self, ids: NDArray[np.int64], computed: int | None = None) -> int:
        """Take the indexed pages of a sequence that begins with these tokens.   -> tokens that are in the pages now

        computed: tokens in the lease's own pages; pages are adopted only after a full page. At least the last token
        is left to compute, for its logits.
        """
        size, computed = self.pool.page_size, self.published * self.pool.page_size if computed is None else computed
        if not self.adopts or computed != self.published * size:
            return computed
        while (self.published + 1) * size < len(ids):
            page = self.pool.index.get(self._key(ids, self.published))
            if page is None:
                break
            self.pool.hold(page)
            if self.published == len(self.pages):
                self.pages.append(page)
            else:  # replaces a page that was reserved
                self._replace(self.published, page)
            self.published += 1
            self.changed = True
        return self.published * size

    def next_key(self, ids: NDArray[np.int64], computed: int) -> Key | None:
        """The key of the next page to compute; None if the page will not be indexed."""
        size = self.pool.page_size
        if not self.adopts or computed != self.published * size or computed + size >= len(ids):
            return None
        return self._key(ids, self.published)

    def missing(self, start: int, stop: int) -> int:
        """Pages that `reserve` would take."""
        return max(0, self.pool.pages_for(stop) - len(self.pages)) + len(self._shared(start, stop))

    def reserve(self, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Make room to write tokens start to stop - 1. -> (page, its copy) for each page to copy before that

        None, without any change, when the pool has too few pages.
        """
        shared = self._shared(start, stop)
        if stop <= len(self.pages) * self.pool.page_size and not shared:  # the usual case in decoding
            return []
        if self.missing(start, stop) > self.pool.available:
            return None
        copies = [(self.pages[index], self.pool.take()) for index in shared]
        for index, (_, page) in zip(shared, copies, strict=True):
            self._replace(index, page)
            self.published = min(self.published, index)
        while len(self.pages) < self.pool.pages_for(stop):
            self.pages.append(self.pool.take())
        self.changed = True
        return copies

    def commit(self, ids: NDArray[np.int64], computed: int) -> None:
        """Note that the first `computed` of these tokens are in the pages. A page that another sequence has computed
        meanwhile replaces this lease's equal one."""
        if not self.pool.share:
            return
        while (self.published + 1) * self.pool.page_size <= computed:
            page = self.pages[self.published]
            known = self.pool.publish(page, self._key(ids, self.published))
            if known != page:
                self.pool.hold(known)
                self._replace(self.published, known)
                self.changed = True
            self.published += 1

    def trim(self, tokens: int) -> None:
        """Return the pages after those that this many tokens need."""
        while len(self.pages) > self.pool.pages_for(tokens):
            self.pool.drop(self.pages.pop())
            self.changed = True

    def fork(self) -> Lease:
        other = Lease(self.pool, adapter=self.adapter)
        other.pages, other.published = list(self.pages), self.published
        for page in other.pages:
            self.pool.hold(page)
        return other

    def close(self) -> None:
        """Return the pages; the last first, so that the beginning of a sequence stays indexed longest."""
        while self.pages:
            self.pool.drop(self.pages.pop())
        self.published, self.changed = 0, True

    def _replace(self, index: int, page: int) -> None:
        self.pool.drop(self.pages[index])
        self.pages[index] = page

    def _key(self, ids: NDArray[np.int64], index: int) -> Key:
        size = self.pool.page_size
        before = self.pool.contents[self.pages[index - 1]] if index else self.adapter or NOTHING_BEFORE
        return before, ids[index * size : (index + 1) * size].tobytes()

    def _shared(self, start: int, stop: int) -> list[int]:
        """Indices of the pages that hold tokens start to stop - 1 and that this lease must copy before it writes."""
        first, last = start // self.pool.page_size, min(len(self.pages), self.pool.pages_for(stop))
        return [index for index in range(first, last) if self.pool.is_shared(self.pages[index])]
