"""Mutants that survive, and why each may."""

KNOWN: dict[str, str] = {
    # -- tokenizers
    'tokenizers/hf_limits.py: MAX_GROWTH = {"normalizer": 1 << 15, "pre_tokenizer": 64, "decoder": 64} # the '
    'largest published: about 6,000, 8 and 3 -> MAX_GROWTH = {"normalizer": 1 << 15, "pre_tokenizer": (65), '
    '"decoder": 64} # the largest published: about 6,000, 8 and 3': (
        "growths of pre-tokenizers are products of 4 and 8: none is 65"
    ),
    'tokenizers/gguf_bpe.py bpe_from_json: path = tokenizer.path or "tokenizer.json" -> path = (tokenizer.path '
    "and 'tokenizer.json')": ("the name of a file in messages"),
    "tokenizers/regex_cost.py SearchLimit.degree: return max((cost.degree for cost in self._costs), default=0) "
    "-> return max((cost.degree for cost in self._costs), default=(1))": (
        "the patterns without costs cost no steps, whatever the degree"
    ),
    "tokenizers/hf_tokenizer.py HfTokenizer._read_vocabulary: if self.vocab_size > MAX_TOKEN_ID: -> "
    "if (self.vocab_size >= MAX_TOKEN_ID):": "a vocabulary of 2^24 tokens to the token",
    "tokenizers/base.py Tokenizer._check_decoded: "
    "if len(ids) * (self._longest + 1) * self._growth > MAX_DECODED_BYTES: -> "
    "if (len(ids) * (self._longest + 1) * self._growth >= MAX_DECODED_BYTES):": (
        "when the exact size is computed, which is compared below"
    ),
    # -- training
    "training/data.py train_sentencepiece: facts = [json.dumps(each, indent=1).encode() for each in (config, "
    '{"bos_token_id": 1, "eos_token_id": 2})] -> facts = [(json.dumps(each)).encode() for each in (config, '
    '{"bos_token_id": 1, "eos_token_id": 2})]': "how the JSON is laid out",
    "training/data.py train_sentencepiece: facts = [json.dumps(each, indent=1).encode() for each in (config, "
    '{"bos_token_id": 1, "eos_token_id": 2})] -> facts = [json.dumps(each, indent=(2)).encode() for each in (config, '
    '{"bos_token_id": 1, "eos_token_id": 2})]': "how the JSON is laid out",
    "training/data.py _paragraph_blocks: end = len(text) if end < 0 else end + 2 -> "
    "end = len(text) if end < (1) else end + 2": "the search begins far behind 0",
    "training/data.py TokenFile.__init__: block = self.ids[start : start + (1 << 22)] -> "
    "block = self.ids[start : start + (1 << (23))]": "ids that are looked at twice",
    'training/data.py train_sentencepiece: "minloglevel": 2, -> "minloglevel": (3),': (
        "how much SentencePiece prints; its errors are raised"
    ),
    'training/run.py TrainingRun._first_masters: masters[name] = np.full(shape, 0 if name.endswith(".bias") else '
    "1, dtype=np.float32) -> masters[name] = (np.full(shape, 0 if name.endswith('.bias') else 1))": (
        "the trainer keeps a copy in float32"
    ),
    "training/data.py: XZ_BLOCK_BYTES = 1 << 20 -> XZ_BLOCK_BYTES = 1 << (21)": ("how much is decompressed at a time"),
    "training/data.py: XZ_BLOCK_BYTES = 1 << 20 -> XZ_BLOCK_BYTES = (2) << 20": ("how much is decompressed at a time"),
    "training/run.py TrainingRun._read_checkpoint: warnings.warn(message, ConfigWarning, stacklevel=2) -> "
    "warnings.warn(message, ConfigWarning, stacklevel=(3))": ("which line of ours the warning names"),
    "training/run.py TrainingRun._cut_metrics: rows = [row for row in rows if not row[0].isdecimal() or "
    "float(row[0]) <= self.step] -> rows = [row for row in rows if not row[(1)].isdecimal() or float(row[0]) <= "
    "self.step]": ("the header is words, the other rows are numbers, in both columns"),
    # -- evaluation
    "evaluation/perplexity.py _blocks: return np.array(ids[: count * length], dtype=np.int64).reshape(count, "
    "length) -> return (np.array(ids[:count * length])).reshape(count, length)": (
        "int64 is NumPy's own choice for integers"
    ),
    'evaluation/perplexity.py _key: digest.update(np.array([len(ids), first, *ids], dtype="<i8").tobytes()) -> '
    "digest.update((np.array([len(ids), first, *ids])).tobytes())": ("int64 is NumPy's own choice for integers"),
    "evaluation/perplexity.py _Journal.add: if time.monotonic() - self._saved_s > SAVE_S: -> if "
    "(time.monotonic() - self._saved_s >= SAVE_S):": ("the clock never shows exactly five seconds"),
    "evaluation/perplexity.py: WINDOWS_AT_A_TIME = 8 -> WINDOWS_AT_A_TIME = (9)": ("how often progress is shown"),
    "evaluation/harness.py TaskModel.loglikelihood_rolling: def loglikelihood_rolling(self, requests: "
    "Sequence[Any], disable_tqdm: bool = False) -> list[float]: -> def loglikelihood_rolling(self, requests: "
    "Sequence[Any], disable_tqdm: bool = (True)) -> list[float]:": ("a parameter of lm-eval's that is not used here"),
    "evaluation/perplexity.py perplexity: "
    "word_perplexity=math.exp(min(nll / words, 700.0)) if rule.scores_all else None, -> "
    "word_perplexity=math.exp(min(nll / words, (701.0))) if rule.scores_all else None,": (
        "a perplexity of e to the 700 says no more than the other"
    ),
    "evaluation/perplexity.py perplexity: value = math.exp(min(mean, 700.0)) -> "
    "value = math.exp(min(mean, (701.0)))": "a perplexity of e to the 700 says no more than the other",
    "evaluation/harness.py TaskModel._loglikelihood_tokens: results: list[tuple[float, bool]] = [(0.0, False)] * "
    "len(requests) -> results: list[tuple[float, bool]] = [(0.0, (True))] * len(requests)": (
        "each is replaced by what is computed"
    ),
    "evaluation/harness.py TaskModel.generate_until: while running and (number == len(requests) or len(running) > "
    "engine.config.max_batch): -> while running and (number == len(requests) or (len(running) >= "
    "engine.config.max_batch)):": ("how many requests are given to the engine at a time"),
    "evaluation/harness.py TaskModel.generate_until: def generate_until(self, requests: Sequence[Any], disable_tqdm: "
    "bool = False) -> list[str]: -> def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = (True)) -> "
    "list[str]:": ("a parameter of lm-eval's that is not used here"),
    # -- inspection
    "inspection/tensor.py TensorView.figure: figure, ((left, *others),) = new_figure(1, len(ratios), size=(9, 3), "
    "width_ratios=ratios) -> figure, ((left, *others),) = new_figure(1, len(ratios), size=((10), 3), "
    "width_ratios=ratios)": ("how large the picture is"),
    "inspection/tensor.py TensorView.text: lines = self._ternary_lines(max(40, width), unicode) if "
    "self.is_ternary else self._dense_lines(width, unicode) -> lines = self._ternary_lines(max((41), width), "
    "unicode) if self.is_ternary else self._dense_lines(width, unicode)": ("a line's least width: one column"),
    "inspection/judge.py _judge_scales: if not median / _FAR < scale < median * _FAR: -> if not (median / _FAR < "
    "scale <= median * _FAR):": ("a scale that is fifty times the median to the bit"),
    "inspection/gguf.py GgufInspector.read_without_model: if name is not None and tensor.type.name in "
    "TERNARY_TYPES: -> if (name is not None or tensor.type.name in TERNARY_TYPES):": (
        "all linears of blocks have names, and `count_raw_plane` looks at the type itself"
    ),
    'inspection/facts.py Inspection._repr_html_: count = f"{len(group)} tensors: " if len(group) > 1 else "" -> '
    'count = f"{len(group)} tensors: " if len(group) > (2) else ""': ("a group is of one finding, or of four at least"),
    "inspection/gguf.py GgufInspector.raw_blocks: step = max(1, _BLOCK_VALUES // tensor.type.block_values) * "
    "tensor.type.block_bytes -> step = max(1, (_BLOCK_VALUES * tensor.type.block_values)) * "
    "tensor.type.block_bytes": ("how many values are read at a time"),
    "inspection/inspector.py count_codes: histogram += np.bincount(flat[start : start + (1 << 20)], "
    "minlength=256) -> histogram += np.bincount(flat[start : start + ((2) << 20)], minlength=256)": (
        "how many codes are counted at a time"
    ),
    "inspection/gguf.py: _BLOCK_VALUES = 1 << 20 -> _BLOCK_VALUES = 1 << (21)": ("how many values are read at a time"),
    "inspection/tensor.py TensorView.figure: ratios = [1.2, 1.2, 1] if self.is_ternary else [1] -> ratios = "
    "[1.2, (2.2), 1] if self.is_ternary else [1]": ("how wide the pictures are beside each other"),
    # -- formats
    "formats/hf/packings.py read_awq: columns = slice(index * group, (index + 1) * group) -> columns = "
    "slice(index * group, (index + (2)) * group)": (
        "the columns beyond the group are written again with the next group, and there is none after the last"
    ),
    "formats/gguf/evidence.py: _MAX_LAYERS_FOR_LAYOUT = 8 -> _MAX_LAYERS_FOR_LAYOUT = (9)": (
        "one more layer is looked at, where eight do not decide"
    ),
    "formats/onnx/export.py: EXTERNAL_BYTES = 1024 # tensors of at least this size go to the file beside, as in "
    "onnx's own converter -> EXTERNAL_BYTES = (1025) # tensors of at least this size go to the file beside, as "
    "in onnx's own converter": ("no tensor that is written has 1024 bytes, and either place is read"),
    "formats/binary_file.py BinaryFile.__init__: self._lead = 0 # bytes that were asked for and not read yet -> "
    "self._lead = (1) # bytes that were asked for and not read yet": ("how far the system reads ahead"),
    'formats/convert/proof.py _differences: yield name and f" ({name[1:]})", tally, _difference(x, y) -> yield '
    'name and f" ({name[1:]})", tally, (_difference(y, x))': ("a difference of one part in 2048, by either of the two"),
    "formats/gguf/model.py GgufCheckpoint.read_ahead: self.file.read_all_ahead() -> pass": (
        "how soon the system reads the file"
    ),
    "formats/gguf/blocks.py _read_blocks: total, step = math.prod(shape) // kind.block_values, "
    "_CHUNK_BLOCKS * 256 // kind.block_values -> total, step = math.prod(shape) // kind.block_values, "
    "(_CHUNK_BLOCKS + 256) // kind.block_values": "how many values are read at a time",
    "formats/hf/packings.py: _CHUNK_VALUES = 1 << 22 -> _CHUNK_VALUES = 1 << (23)": (
        "how many values are read at a time"
    ),
    "formats/gguf/tl.py _excess: cols = by_column.reshape(*loops, small_k).sum(axis=(0, 2), "
    "dtype=np.float32).astype(np.float64) -> cols = (by_column.reshape(*loops, small_k).sum(axis=(0, "
    "2))).astype(np.float64)": "the numbers are float32, and so is NumPy's own choice for their sum",
    "formats/native/model.py NativeCheckpoint.read_plane: self._check_padding(name, packed[:, -1] >> np.uint8(2 * (k % "
    "4)), 0x55 >> 2 * (k % 4), k % 4) -> self._check_padding(name, packed[:, -1] >> np.uint8(2 * (k % 4)), (86) >> 2 * "
    "(k % 4), k % 4)": "the two bits that differ are shifted out",
    # -- registry
    'formats/registry/names.py choose_files: listed = ", ".join((chosen or single)[:20]) or "none" -> '
    'listed = ", ".join((chosen or single)[:(21)]) or "none"': "how many names a message has",
    "formats/registry/describe.py usage_of: last = date_of(max((each.st_atime for each in stats), default=0.0)) -> "
    "last = date_of(max((each.st_atime for each in stats), default=(1.0)))": "both seconds are of one day",
    "formats/registry/hub_cache.py cached_models: "
    'commit = read_bounded(file, FormatError, 100).decode(errors="replace").strip() -> '
    'commit = read_bounded(file, FormatError, (101)).decode(errors="replace").strip()': (
        "a name of a commit has 40 characters"
    ),
    # -- serving/http
    "serving/http/choices.py Asked: stream: bool = False -> stream: bool = (True)": "all that make one say it",
    "serving/http/batch.py: LINES_AT_A_TIME = 16 # answered together: one item of a worker -> LINES_AT_A_TIME = "
    "(17) # answered together: one item of a worker": ("how much one item of a worker is; the answers are the same"),
    'serving/http/choices.py usage: first = [choice.handle.stats for choice in choices[:: asked.params.get("n", 1)]] '
    '-> first = [choice.handle.stats for choice in choices[:: asked.params.get("n", (2))]]': (
        "without an n there is one prompt and one choice"
    ),
    "serving/http/shelf.py Place: last_used_s: float = 0.0 -> last_used_s: float = (1.0)": (
        "it is set whenever a model that was borrowed is given back, and before that the model is not loaded"
    ),
    "serving/http/app.py: return Response(status_code=499) # the client has gone -> return "
    "Response(status_code=(500)) # the client has gone": ("the client has gone away"),
    "serving/http/server.py: EMBEDDING_TEXTS = 16 # at a time; between them a client that went away is noticed -> "
    "EMBEDDING_TEXTS = (17) # at a time; between them a client that went away is noticed": ("how soon it is noticed"),
    "serving/http/tool_formats.py read_json_call: letter = yield from read_value(first, parts.append) -> letter "
    "= yield from read_value(first, (parts.extend))": ("what is added is one letter each time"),
    # -- serving
    "serving/live.py draw_speeds: largest = max(speeds, default=0.0) or 1.0 -> largest = max(speeds, "
    "default=(1.0)) or 1.0": ("without speeds the default is 1.0 either way"),
    "serving/live.py: MAX_ROWS = 16 # requests shown; the others are only counted -> MAX_ROWS = (17) # requests "
    "shown; the others are only counted": ("how many rows the picture of the server shows"),
    "serving/scheduler.py Scheduler._free_slot: lowest = min(self.running, key=lambda job: (job.priority, "
    "-job.rank[0], -job.rank[1][0])) -> lowest = min(self.running, key=lambda job: (job.priority, -job.rank[0], "
    "-job.rank[1][(1)]))": ("which of the rows that arrived in one moment pauses"),
    "serving/tickets.py Outbox.__init__: self.news = asyncio.Event() -> pass": (
        "`subscribe` makes an event for each loop before anything waits for it or sets it"
    ),
    "serving/worker.py Worker._expire: self._drop_stale_deadlines() -> pass": (
        "a deadline of a request that has ended is passed over below, and dropped while the engine sleeps"
    ),
    "serving/scheduler.py: NO_SLOT = -1 -> NO_SLOT = (1)": (
        "a job without a slot is never asked for it; the number is seen in a debugger only"
    ),
    "serving/step.py PagedStepper.prepare: cache.page_table[piece.slot, len(lease.pages) :] = NO_PAGE -> pass": (
        "pages behind those of the sequence are looked up by nothing"
    ),
    'serving/http/shapes.py infill_ids: front = tokenizer.encode("")[:1] if tokenizer.bos_id in '
    'tokenizer.encode("")[:1] else [] -> front = tokenizer.encode("")[:1] if tokenizer.bos_id in '
    'tokenizer.encode("")[:(2)] else []': "a token that begins each text is the first one",
    "serving/tickets.py: NEWEST_CHUNKS = 16 -> NEWEST_CHUNKS = (17)": ("how much of a text the live view shows"),
    "serving/scheduler.py Scheduler._add_steps: plan.copies += lease.reserve(start, stop) or () -> plan.copies += "
    "(lease.reserve(start, stop) and ())": "the pages behind the next token's are the sequence's own: none is copied",
    'serving/live.py LiveView.widget: self._button = ipywidgets.Button(description="Stop watching", icon="stop") '
    "-> self._button = (ipywidgets.Button(description='Stop watching'))": (
        "the picture on a button that has words too"
    ),
    # -- cli
    'cli/bench_shared.py: shape_option = click.option( "--shape", "shapes", type=WholeNumbers("NxK", "x", 2), '
    "multiple=True, help=\"[default: those of 2B-4T]\" ) -> shape_option = (click.option('shapes', '--shape', "
    "type=WholeNumbers('NxK', 'x', 2), multiple=True, help='[default: those of 2B-4T]'))": (
        "click takes an option's names in any order"
    ),
    "cli/shell.py console.PrintableConsole.render: for text, style, control in super().render(*args, **kwargs): "
    "-> for text, style, control in (super().render(*args)):": ("rich gives no keyword arguments"),
    'cli/generation_options.py declared_option: settings["help"] += " @FILE reads it." -> pass': (
        "a sentence of the help of an option"
    ),
    "cli/generation_options.py: MAX_TEXT_BYTES = 64 << 20 # of @FILE -> MAX_TEXT_BYTES = (65) << 20 # of @FILE": (
        "prompts have some kilobytes"
    ),
    "formats/gguf/i2_s.py LayoutEvidence.add: self.sums[layout] += _squared_z(columns[layout], vectors[layout]) -> "
    "self.sums[layout] += (_squared_z(vectors[layout], columns[layout]))": "a correlation, of the one with the other",
    "formats/convert/proof.py _logits: "
    'logits = run(be, weights, config, TokenBatch.of([(0, 0, tokens)]), cache, path="ops").all() -> '
    "logits = (run(be, weights, config, TokenBatch.of([(0, 0, tokens)]), cache)).all()": (
        "another path of the same backend, which gives the same bits"
    ),
    "cli/watch_command.py _sources: arguments = [Path(word) for word in command[1:] if len(word) < 4096] -> "
    "arguments = [Path(word) for word in command[1:] if len(word) < (4097)]": "longer than any path may be",
    "formats/hf/adapter.py _check: if unknown := [key[:100] for key in raw if key not in known and not "
    "is_off(raw[key])]: -> if unknown := [key[:(101)] for key in raw if key not in known and not "
    "is_off(raw[key])]:": ("how much of a key a message has"),
    "formats/gguf/tl2.py _three_weights: table = np.full((32, 3), 2, dtype=np.int8) -> table = "
    "np.full(((33), 3), 2, dtype=np.int8)": ("a row of the table that no code of five bits reaches"),
    "tokenizers/gguf_vocab.py _json: return json.dumps(value, ensure_ascii=False, "
    'indent=1).encode("utf-8") -> return json.dumps(value, ensure_ascii=False, '
    'indent=(2)).encode("utf-8")': ("how far the lines of a file are indented"),
    "tokenizers/base.py Tokenizer._find_number: if number is None or (number < self.vocab_size and "
    "self._token(number) is not None): -> if number is None or ((number <= self.vocab_size) and "
    "self._token(number) is not None):": ("no kind of tokenizer has a token of that number"),
    "formats/binary_file.py: _BLOCK = 1 << 18 # values checked at a time -> _BLOCK = (2) << 18 # values "
    "checked at a time": ("how many values are looked at at a time"),
    "formats/gguf/export.py _ModelTensors._matrix: return iq2_bn_rows(pack_ternary(w_t), "
    "np.full((len(w_t), 1), scale, dtype=np.float32)) -> return iq2_bn_rows(pack_ternary(w_t), "
    "(np.full((len(w_t), 1), scale)))": ("the scale is a float32"),
    "formats/binary_file.py BinaryFile._read_large.read: return os.preadv(self._file.fileno(), "
    "[target[start : start + part]], offset + start) -> return os.preadv(self._file.fileno(), "
    "[target[start : (start - part)]], offset + start)": ("parts are read twice: what is there is the same"),
    'tokenizers/templates/sandbox.py _Rewriter.visit_For: node.iter = _hook("loop", node.iter, '
    'nodes.Const(weight, lineno=node.lineno)) -> node.iter = _hook("loop", node.iter, '
    "(nodes.Const(weight)))": ("a constant has no error whose line is named"),
    "tokenizers/regex_cost.py SearchLimit.is_cheap: return steps <= _SPARE_STEPS + _STEPS_PER_CHARACTER *"
    " length -> return (steps < _SPARE_STEPS + _STEPS_PER_CHARACTER * length)": (
        "at the bound itself the text is looked at, and taken"
    ),
    'tokenizers/regex_cost.py SearchLimit._end_of_class: if character == "[" and pattern[position + 1 : '
    'position + 3].startswith(("]", "^]")): -> if character == "[" and pattern[position + 1 : position + '
    '(4)].startswith(("]", "^]")):': ("two characters are compared"),
    "formats/hf/masters.py masters_of: sizes[zero[0]] = scale * 2.0**-40 # else it could be read as a "
    "ternary matrix that was saved in a float dtype -> sizes[zero[0]] = scale * (3.0)**-40 # else it "
    "could be read as a ternary matrix that was saved in a float dtype": (
        "a size that is small beside the others and not 0; how small does not matter"
    ),
    "formats/native/base3.py unpack_base3: fours = -(-columns // 4) -> fours = -((-columns * 4))": (
        "a block that is wider than what is taken from it"
    ),
    "formats/binary_file.py: _READ_BYTES = 8 << 20 # at a time, so that the read-ahead moves on within a "
    "large tensor -> _READ_BYTES = (9) << 20 # at a time, so that the read-ahead moves on within a large "
    "tensor": ("how many bytes are read at a time"),
    "formats/convert/__init__.py fits: proof = convert(source, path, name, options=options, "
    "tl_tiles=tl_tiles, compute=False) -> proof = convert(source, path, name, options=options, "
    "tl_tiles=tl_tiles, compute=(True))": ("the same reports, which take longer"),
    "formats/gguf/export.py write_split_gguf: largest_entry = MAX_NAME + 8 * MAX_RANK + DEFAULT_ALIGNMENT"
    " + 32 # of a tensor in the header, and its padding -> largest_entry = MAX_NAME + (9) * MAX_RANK + "
    "DEFAULT_ALIGNMENT + 32 # of a tensor in the header, and its padding": (
        "how far a part stays below its limit: some bytes for each tensor"
    ),
    'formats/checkpoint.py LoadOptions: dense: str = option("stored", choice("stored", "int8")) -> dense:'
    " str = option(\"stored\", (choice('int8', 'stored')))": ("the order of two choices in a help"),
    "formats/gguf/blocks.py iq2_bn_rows: step = max(1, _CHUNK_BLOCKS * 64 // packed.shape[1]) -> step = "
    "max((2), _CHUNK_BLOCKS * 64 // packed.shape[1])": ("how many rows are written at a time"),
    "formats/gguf/tl2.py _three_weights: table = np.full((32, 3), 2, dtype=np.int8) -> table = (np.full((32, 3), 2))": (
        "how wide the numbers of the table are: what is read is int8 all the same"
    ),
    "formats/gguf/tl2.py pack_tl2: bits = (blocks < 0).reshape(-1, 2, 16, 8).transpose(0, 2, 3, "
    "1).reshape(-1, 16) -> bits = ((blocks < 0).reshape(-1, 2, 16, 8).transpose(0, 2, 3, 1).reshape(16, "
    "-1))": ("the bits are packed in the same order, whatever the shape"),
    "formats/hf/folder.py CheckpointTensors.read_ahead: names = sorted(file.tensors, key=lambda name: "
    '[each.zfill(9) for each in name.split(".")]) -> names = sorted(file.tensors, key=lambda name: '
    '[each.zfill((10)) for each in name.split(".")])': ("the numbers in names have fewer digits"),
    "formats/gguf/config.py read_gguf_config: if isinstance(drafts, int) and 0 < drafts < layers: -> if "
    "isinstance(drafts, int) and (0 <= drafts < layers):": ("of 0 blocks after the model's own none is left out"),
    "tokenizers/templates/sandbox.py render: parts.append(part) -> (parts.extend)(part)": (
        "the same text, joined from its characters"
    ),
    "tokenizers/templates/sandbox.py BoundedEnvironment.call: budget.will_make(size_after_replace(owner, "
    "*args, **kwargs)) -> budget.will_make((size_after_replace(owner, *args)))": (
        "str.replace takes no keyword before Python 3.13"
    ),
    "cli/shell.py Interface.make_context: context = super().make_context(info_name, args, *more, **settings) -> "
    "context = (super().make_context(info_name, args, *more))": (
        "the group of all commands has no parent and no other settings"
    ),
    "cli/signals.py: GRACE_S = 3.0 # for a child that was asked to end -> GRACE_S = (4.0) # for a child that was "
    "asked to end": ("how long a child that was asked to end is waited for"),
    'formats/convert/proof.py _compare_logits: be = choose_backend("cython" if '
    'available_backends()["cython"] is None else "numpy") -> be = choose_backend("cython" if '
    "(available_backends()['cython'] is not None) else \"numpy\")": (
        "the other backend, on which both models are computed"
    ),
    "formats/gguf/tl.py _tl2_counts: by_row = zeros.sum(axis=1, dtype=np.uint8)[tiles].sum(axis=2, "
    "dtype=np.float32) -> by_row = (zeros.sum(axis=1))[tiles].sum(axis=2, dtype=np.float32)": (
        "how wide the numbers of a table are: no sum in it is more than 6"
    ),
    "formats/convert/proof.py: _BLOCK_VALUES = 1 << 22 -> _BLOCK_VALUES = (2) << 22": (
        "how many values are compared at a time"
    ),
    "formats/gguf/file.py _Header._need: if end > len(self._buffer): -> if (end >= len(self._buffer)):": (
        "how far a header is read ahead"
    ),
    "formats/gguf/file.py _Header._need: grown = min(self.limit, max(end, 2 * len(self._buffer), 1 << 16)) "
    "-> grown = min(self.limit, max(end, 2 * len(self._buffer), (1 >> 16)))": ("how far a header is read ahead"),
    "evaluation/perplexity.py cut_sentences: return [(np.array(each, dtype=np.int64), 1) for each in packs] -> "
    "return [((np.array(each)), 1) for each in packs]": ("int64 is NumPy's own choice for integers"),
    "formats/binary_file.py: _ADVISED_BYTES = 512 << 10 # per request: Linux reads no more than its disk "
    "takes at once, and forgets the rest -> _ADVISED_BYTES = (513) << 10 # per request: Linux reads no "
    "more than its disk takes at once, and forgets the rest": ("how much is asked of the disk at a time"),
    "formats/gguf/tl2.py pack_tl2: blocks = v.reshape(ms, 32, k3 // big_k, big_k // 24, 8).transpose(2, 0, "
    "3, 1, 4).reshape(-1, 32, 8) -> blocks = (v.reshape(ms, 32, k3 // big_k, big_k // 24, 8).transpose(2, "
    "0, 3, 1, 4).reshape(32, -1, 8))": ("the same values in the same order, whatever the shape"),
    "formats/gguf/tl_tiles.py _divisors: small = [d for d in range(1, isqrt(number) + 1) if number % d == "
    "0] -> small = [d for d in range(1, isqrt(number) + (2)) if number % d == 0]": (
        "they are a set: a divisor above the root is there already"
    ),
    "formats/gguf/tl2.py _three_weights: table[abs(v) + 16 * (v < 0)] = w0 - 1, rest // 3 - 1, rest % 3 - "
    "1 -> table[(abs(v) - 16 * (v < 0))] = w0 - 1, rest // 3 - 1, rest % 3 - 1": (
        "an index below 0 counts from the end of the table, which is the same place"
    ),
    'formats/hf/wrappers.py hf_form: require(model_type in hf_forms(), "model_type", f"one of {\', '
    "'.join(hf_forms())}\", model_type) -> pass": ("every family has a form in Hugging Face's files"),
    "formats/gguf/tl.py _tl1_counts: units = data.reshape(-1, small_m // 16, 64 // small_m, 2, 8) # "
    "tile, m16, k4, half of the 16 rows, row -> units = data.reshape(-1, small_m // 16, (65) // "
    "small_m, 2, 8) # tile, m16, k4, half of the 16 rows, row": ("bm is 32 or 64, and of 65 columns as many fit"),
    "formats/gguf/i2_s.py pack_from_i2_s: step = max(1, _CHUNK_WORDS // blocks.shape[1]) -> step = "
    "max(1, (_CHUNK_WORDS * blocks.shape[1]))": ("how many blocks are packed at a time"),
    "formats/native/base3.py pack_base3: rows = max(1, _BLOCK_BYTES // columns) -> rows = max((2), "
    "_BLOCK_BYTES // columns)": ("how many rows are packed at a time"),
    "formats/gguf/i2_s.py _densities_of_all: rows = np.empty((groups, 4, 4), dtype=np.int32) # (line, "
    "field, quarter) -> rows = (np.empty((groups, 4, 4))) # (line, field, quarter)": (
        "counts of ones, which float64 holds exactly"
    ),
    "formats/hf/masters.py masters_of: sizes[zero[0]] = scale * 2.0**-40 # else it could be read as a "
    "ternary matrix that was saved in a float dtype -> sizes[zero[0]] = scale * 2.0**-(41) # else it "
    "could be read as a ternary matrix that was saved in a float dtype": (
        "a size that is small beside the others and not 0; how small does not matter"
    ),
    "formats/gguf/export.py write_split_gguf: largest_entry = MAX_NAME + 8 * MAX_RANK + "
    "DEFAULT_ALIGNMENT + 32 # of a tensor in the header, and its padding -> largest_entry = (MAX_NAME "
    "+ 8 * MAX_RANK + DEFAULT_ALIGNMENT - 32) # of a tensor in the header, and its padding": (
        "how far a part stays below its limit: some bytes for each tensor"
    ),
    'formats/gguf/export.py _llama_cpp_order: return (int(name.split(".")[1]) if '
    'name.startswith("blk.") else -1), name -> return (int(name.split(".")[1]) if '
    'name.startswith("blk.") else -(2)), name': ("the tensors outside of the blocks are before block 0 as well"),
    "formats/gguf/i2_s.py pack_from_i2_s: step = max(1, _CHUNK_WORDS // blocks.shape[1]) -> step = "
    "max((2), _CHUNK_WORDS // blocks.shape[1])": ("how many blocks are packed at a time"),
    'formats/gguf/tl_tiles.py _tilings: tails = (0,) if kind == "tl1" else range(0, min(TL2_MAX_TAIL, '
    'k - 1) + 1, 32) -> tails = (0,) if kind == "tl1" else range(0, min(TL2_MAX_TAIL, k - 1) + (2), 32)': (
        "a tail of all columns has no column sizes"
    ),
    "formats/gguf/blocks.py _stq1_0_slots: lanes = codes.reshape(-1, 4, 4, 16).swapaxes(2, "
    "3).reshape(len(codes), 64, 4) -> lanes = (codes.reshape(4, -1, 4, 16)).swapaxes(2, "
    "3).reshape(len(codes), 64, 4)": ("the same values in the same order, whatever the shape"),
    "formats/gguf/blocks.py _pack_tq1_0: for trit in range(5): -> for trit in range((6)):": (
        "of a sixth trit nothing is written"
    ),
    "formats/hf/writer.py _pack_for_mlx: usual = Counter(sizes.values()).most_common(1)[0][0] -> usual "
    "= Counter(sizes.values()).most_common((2))[0][0]": ("the first of two is the first of one"),
    'formats/gguf/evidence.py _compare_layouts: comparison.add(columns["down_proj"], rows[short]) -> '
    "(comparison.add(rows[short], columns['down_proj']))": ("a correlation, of the one with the other"),
    "formats/gguf/blocks.py _stq1_0_codes: return lanes.reshape(-1, 4, 16, 4).swapaxes(2, "
    "3).reshape(-1, 256) -> return (lanes.reshape(4, -1, 16, 4)).swapaxes(2, 3).reshape(-1, 256)": (
        "the same values in the same order, whatever the shape"
    ),
    "formats/gguf/tl2.py tl2_problem: step = 1 << 14 -> step = 1 << (15)": ("how many bytes are checked at a time"),
    "formats/gguf/evidence.py _compare_layouts: comparison.add(columns[short], dict.fromkeys(LAYOUTS, "
    "norm(before))) -> (comparison.add(dict.fromkeys(LAYOUTS, norm(before)), columns[short]))": (
        "a correlation, of the one with the other"
    ),
    'formats/hf/packings.py _planes: zeros = np.full(8, _FOUR_ZEROS).view("u8" if data.shape[1] // '
    'scales.shape[1] % 8 == 0 else "u1")[0] -> zeros = np.full(8, _FOUR_ZEROS).view("u8" if '
    'data.shape[1] // scales.shape[1] % (9) == 0 else "u1")[0]': ("how many bytes are compared at a time"),
    "formats/hf/writer.py _stack_experts: shape = len(place.parts), *tensors[0].shape -> shape = "
    "len(place.parts), *tensors[(1)].shape": (
        "the matrices of a layer's experts, of which there are several, have one shape"
    ),
    "formats/gguf/tl.py infer_tiles: if lead > _SIGMAS: -> if (lead >= _SIGMAS):": (
        "no matrix is ahead by eight sigmas to the bit"
    ),
    "formats/gguf/evidence.py: _SAMPLE_VALUES = 1 << 16 # read from each dense matrix to decide "
    "whether it is ternary -> _SAMPLE_VALUES = 1 << (17) # read from each dense matrix to decide "
    "whether it is ternary": ("how many values are looked at first; the rest is checked when the matrix is read"),
    "formats/binary_file.py: _READ_BYTES = 8 << 20 # at a time, so that the read-ahead moves on within "
    "a large tensor -> _READ_BYTES = 8 << (21) # at a time, so that the read-ahead moves on within a "
    "large tensor": ("how many bytes are read at a time"),
}
