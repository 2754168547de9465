// SentencePiece's BPE with byte pieces, as storyteller has it: without a normaliser, and without tokens that were added
// later. And byte-level BPE, of GPT-2, Llama 3 and Qwen, for the reader's own model.

const UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, BYTE = 6; // ModelProto.SentencePiece.Type

export class Tokenizer {
  // vocabulary: {pieces, scores, types}; bos: the id that begins each text, or null
  constructor({ pieces, scores, types }, bos) {
    Object.assign(this, { pieces, scores, types, bos });
    this.ids = new Map();
    this.bytes = new Map();
    this.whole = []; // pieces that are cut out of the text before it is merged
    pieces.forEach((piece, id) => {
      if (types[id] === BYTE) this.bytes.set(parseInt(piece.slice(3, 5), 16), id);
      else if (types[id] === CONTROL || types[id] === UNKNOWN) this.whole.push(...(piece ? [piece] : []));
      else this.ids.set(piece, id);
    });
    this.defined = pieces.filter((piece, id) => piece && types[id] === USER_DEFINED).sort((a, b) => b.length - a.length);
    this.control = anyOf(this.whole);
  }

  // text -> ids, beginning with the id of <s>, which a text that has it already does not get twice
  encode(text) {
    const ids = [];
    let isFirst = true; // only the start of the text gets a space in front
    for (const part of text.split(this.control)) {
      if (this.whole.includes(part)) ids.push(this.pieces.indexOf(part));
      else if (part) ids.push(...this.merge((isFirst ? "▁" : "") + part.replaceAll(" ", "▁")));
      isFirst = isFirst && !part;
    }
    return this.bos === null || this.bos === undefined || ids[0] === this.bos ? ids : [this.bos, ...ids];
  }

  // Byte-pair encoding: of all neighbours that together are a piece, the pair with the highest score is merged, the
  // leftmost of equals, until none is left.
  merge(text) {
    const symbols = this.split(text);
    for (;;) {
      let best = -1, score = -Infinity;
      for (let i = 0; i + 1 < symbols.length; i++) {
        if (symbols[i].isFixed || symbols[i + 1].isFixed) continue;
        const id = this.ids.get(symbols[i].text + symbols[i + 1].text);
        if (id !== undefined && this.scores[id] > score) [best, score] = [i, this.scores[id]];
      }
      if (best < 0) break;
      symbols.splice(best, 2, { text: symbols[best].text + symbols[best + 1].text });
    }
    return symbols.flatMap(({ text }) => this.ids.get(text) ?? [...new TextEncoder().encode(text)].map((byte) => known(this.bytes.get(byte), text)));
  }

  // Characters, and user-defined pieces, which stay as they are.
  split(text) {
    const symbols = [];
    for (let at = 0; at < text.length; at += symbols.at(-1).text.length) {
      const defined = this.defined.find((piece) => text.startsWith(piece, at));
      symbols.push(defined ? { text: defined, isFixed: true } : { text: String.fromCodePoint(text.codePointAt(at)) });
    }
    return symbols;
  }

  isByte(id) {
    return this.types[id] === BYTE;
  }

  // A token's text. A byte of a longer character is shown as the piece: <0xC3>
  text(id) {
    if (!this.isByte(id)) return (this.pieces[id] ?? "").replaceAll("▁", " "); // a model may have more rows than pieces
    const byte = parseInt(this.pieces[id].slice(3, 5), 16);
    return byte < 128 ? String.fromCharCode(byte) : this.pieces[id];
  }

  // The text of ids, without <s> and </s>, and without the space in front of it.
  decode(ids) {
    const shown = ids.filter((id) => this.types[id] !== CONTROL && this.types[id] !== UNKNOWN);
    const bytes = shown.flatMap((id, i) => {
      if (this.isByte(id)) return [parseInt(this.pieces[id].slice(3, 5), 16)];
      return [...new TextEncoder().encode(i ? this.text(id) : this.text(id).replace(/^ /, ""))];
    });
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
  }
}

// The id of a token for a part of the text, which must be there.
function known(id, text) {
  if (id === undefined) throw new Error(`The vocabulary has no token for “${text}”.`);
  return id;
}

// An expression of these texts, the first that fits; as a group, so that split() keeps them.
function anyOf(texts) {
  return texts.length ? new RegExp(`(${texts.map((text) => text.replace(/[^\w]/g, "\\$&")).join("|")})`) : /(?!)/;
}

// The pieces of a tokenizer.model, up to a number; null for one with a normaliser, or that is no BPE: only what is read
// here is run.
export function readSentencePieces(data, limit) {
  const isBytes = (value) => value instanceof Uint8Array, pieces = [], scores = [], types = [];
  const broken = () => new Error("tokenizer.model is damaged or cut off");
  let kind = 1, isPlain = false;
  for (const [field, value] of protobuf(data)) {
    if (field <= 3 && !isBytes(value)) throw broken();
    const inner = field <= 3 ? Object.fromEntries(protobuf(value)) : {};
    if (field === 1) {
      if (!isBytes(inner[1]) || (inner[2] !== undefined && inner[2].length !== 4) || isBytes(inner[3])) throw broken();
      if (pieces.length === limit) throw new Error(`tokenizer.model has more pieces than the model has tokens, ${limit}`);
      pieces.push(new TextDecoder().decode(inner[1]));
      scores.push(inner[2] ? new DataView(inner[2].slice().buffer).getFloat32(0, true) : 0);
      types.push(inner[3] ?? 1);
    } else if (field === 2) kind = inner[3] ?? 1;
    else if (field === 3) isPlain = !inner[2]?.length && inner[3] !== 0 && inner[4] === 0 && inner[5] !== 0;
  }
  return kind === 2 && isPlain ? { pieces, scores, types } : null;
}

// The fields of a protobuf message: [number, a whole number or bytes].
function* protobuf(data) {
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let shift = 1; ; shift *= 128) {
      if (at >= data.length) throw new Error("tokenizer.model is damaged or cut off");
      value += (data[at] & 127) * shift;
      if (data[at++] < 128) return value;
    }
  };
  while (at < data.length) {
    const key = varint(), wire = key % 8, number = Math.floor(key / 8);
    if (wire === 0) yield [number, varint()];
    else {
      const size = wire === 2 ? varint() : wire === 5 ? 4 : 8;
      yield [number, data.subarray(at, (at += size))];
    }
  }
}

// -- byte-level BPE ---------------------------------------------------------------------------------------------------

const GPT2 = String.raw`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`;
const LLAMA3 = String.raw`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`;
const QWEN2 = LLAMA3.replace("{1,3}", "");
const PATTERNS = { __proto__: null, "gpt-2": GPT2, "llama-bpe": LLAMA3, llama3: LLAMA3, falcon3: LLAMA3, falcon_e: LLAMA3, qwen2: QWEN2 };
const list = (value) => (Array.isArray(value) ? value : []);

// The character that stands for each byte.
const BYTES = [...Array(256).keys()].map((byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173) ? byte : -1);
const CHARACTERS = BYTES.map((byte, i) => String.fromCharCode(byte >= 0 ? byte : 256 + BYTES.slice(0, i).filter((each) => each < 0).length));

export class BytePairTokenizer {
  // Of a tokenizer.json, for a model of so many tokens; null if it is of another kind.
  static fromJson({ model, added_tokens, pre_tokenizer, post_processor, normalizer }, limit) {
    const steps = list(pre_tokenizer?.pretokenizers ?? [pre_tokenizer]), split = steps.find((step) => step?.type === "Split")?.pattern?.Regex;
    const pattern = split ?? (steps[0]?.type === "ByteLevel" ? GPT2 : null);
    if (steps.some((step) => step?.add_prefix_space)) return null;
    if (model?.type !== "BPE" || (normalizer && normalizer.type !== "NFC") || !Object.values(PATTERNS).includes(pattern)) return null;
    const added = list(added_tokens).map((each) => [each?.content, each?.id]), pieces = [], types = [];
    for (const [piece, id] of [...Object.entries(Object(model.vocab)), ...added]) {
      // An id far away would make an array of that length.
      if (typeof piece !== "string" || !(Number.isInteger(id) && id >= 0 && id < limit)) throw new Error(`tokenizer.json: a token has the id ${JSON.stringify(id)}; the model has ${limit} tokens`);
      pieces[id] = piece;
    }
    for (const [, id] of added) types[id] = CONTROL;
    for (let id = 0; id < pieces.length; id++) pieces[id] ??= ""; // an id that no token has
    const around = list(post_processor?.processors ?? [post_processor]).find((step) => step?.type === "TemplateProcessing");
    const bos = around?.special_tokens?.[around.single?.[0]?.SpecialToken?.id]?.ids?.[0] ?? null;
    const merges = list(model.merges).map((merge) => (Array.isArray(merge) ? merge.join(" ") : merge)), form = normalizer?.type;
    return new BytePairTokenizer({ pieces, merges, types, pattern, bos, form, takesWhole: model.ignore_merges ?? false });
  }

  // merges: "a b", the most urgent first; types: as SentencePiece's. Null for a way to cut texts that is not known here.
  static open(pieces, merges, types, pre, addsBos, bos) {
    const pattern = PATTERNS[pre], isLlama3 = pattern === LLAMA3; // which takes whole words, and begins with BOS by default
    return pattern && merges ? new BytePairTokenizer({ pieces, merges, types, pattern, bos: (addsBos ?? isLlama3) ? bos : null, takesWhole: isLlama3 }) : null;
  }

  // takesWhole: a word that is a token is not merged; form: of Unicode
  constructor({ pieces, merges, types, pattern, bos, takesWhole, form }) {
    Object.assign(this, { pieces, types, bos, takesWhole, form, ids: new Map(pieces.map((piece, id) => [piece, id])) });
    this.ranks = new Map(merges.map((merge, rank) => [merge, rank]));
    const anyCase = pattern.replace(/\(\?i:(.*?)\)/, (_, inner) => inner.replace(/[a-z]/g, (letter) => `[${letter}${letter.toUpperCase()}]`));
    this.pattern = new RegExp(anyCase.replaceAll("\\s", "\\p{White_Space}").replaceAll("\\S", "\\P{White_Space}"), "gu");
    const whole = pieces.filter((piece, id) => piece && (types[id] === CONTROL || types[id] === USER_DEFINED)).sort((a, b) => b.length - a.length);
    this.whole = new Set(whole);
    this.control = anyOf(whole);
    this.byte = new Map(CHARACTERS.map((character, byte) => [character, byte]));
  }

  encode(text) {
    const parts = (this.form ? text.normalize(this.form) : text).split(this.control);
    const ids = parts.flatMap((part) => (this.whole.has(part) ? [this.ids.get(part)] : (part.match(this.pattern) ?? []).flatMap((word) => this.merge(word))));
    return this.bos === null || this.bos === undefined ? ids : [this.bos, ...ids];
  }

  merge(word) {
    const symbols = [...new TextEncoder().encode(word)].map((byte) => CHARACTERS[byte]), piece = symbols.join("");
    if (this.takesWhole && this.ids.has(piece)) return [this.ids.get(piece)];
    for (;;) {
      const ranks = symbols.slice(1).map((symbol, i) => this.ranks.get(`${symbols[i]} ${symbol}`) ?? Infinity);
      const best = ranks.indexOf(ranks.reduce((a, b) => Math.min(a, b), Infinity));
      if (best < 0 || ranks[best] === Infinity) return symbols.map((symbol) => known(this.ids.get(symbol), word));
      symbols.splice(best, 2, symbols[best] + symbols[best + 1]);
    }
  }

  // The text of ids, without special tokens.
  decode(ids) {
    const shown = ids.filter((id) => this.types[id] !== CONTROL).map((id) => this.pieces[id] ?? "");
    const bytes = shown.flatMap((piece) => (this.whole.has(piece) ? [...new TextEncoder().encode(piece)] : [...piece].map((character) => this.byte.get(character) ?? 63)));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
  }
}
