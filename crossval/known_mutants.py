"""Mutants that survive, and why each may."""

KNOWN: dict[str, str] = {
    # -- evaluation
    "evaluation/perplexity.py perplexity: "
    'hint = "" if length < 4 else f"; a shorter length is another protocol\'s figure: say {longest}" -> '
    'hint = "" if (length <= 4) else f"; a shorter length is another protocol\'s figure: say {longest}"': (
        "a length of 4 is refused only by a model whose context is shorter than 4 tokens"
    ),
    # -- formats
    "formats/hf/packings.py read_awq: columns = slice(index * group, (index + 1) * group) -> "
    "columns = slice(index * group, (index + (2)) * group)": (
        "the columns beyond the group are written again with the next group, and there is none after the last"
    ),
    "formats/native/base3.py unpack_base3: "
    "packed[start : start + rows] = five_bytes.reshape(len(block), -1)[:, : packed.shape[1]] -> "
    "packed[start : start + rows] = five_bytes.reshape(len(block), -(2))[:, : packed.shape[1]]": (
        "NumPy takes any negative size as the one to compute"
    ),
    "formats/gguf/evidence.py: _MAX_LAYERS_FOR_LAYOUT = 8 -> _MAX_LAYERS_FOR_LAYOUT = (9)": (
        "one more layer is looked at, where eight do not decide"
    ),
    # -- serving
    "serving/tickets.py Outbox.__init__: self.news = asyncio.Event() -> pass": (
        "`subscribe` makes an event for each loop before anything waits for it or sets it"
    ),
    "serving/worker.py Worker._expire: self._drop_stale_deadlines() -> pass": (
        "a deadline of a request that has ended is passed over below, and dropped while the engine sleeps"
    ),
    "serving/scheduler.py: NO_SLOT = -1 -> NO_SLOT = (1)": (
        "a job without a slot is never asked for it; the number is seen in a debugger only"
    ),
}
