// The tokenizer of storyteller: SentencePiece's BPE with byte pieces, from the pieces of tokenizer.model.
// Not for other models: it has no normaliser, and no tokens that were added later.

const UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, BYTE = 6; // ModelProto.SentencePiece.Type

export class Tokenizer {
  // vocabulary: {pieces, scores, types}; bos: the id that begins each text
  constructor({ pieces, scores, types }, bos) {
    Object.assign(this, { pieces, scores, types, bos });
    this.ids = new Map();
    this.bytes = new Map();
    this.whole = []; // pieces that are cut out of the text before it is merged
    pieces.forEach((piece, id) => {
      if (types[id] === BYTE) this.bytes.set(parseInt(piece.slice(3, 5), 16), id);
      else if (types[id] === CONTROL || types[id] === UNKNOWN) this.whole.push(piece);
      else this.ids.set(piece, id);
    });
    this.defined = pieces.filter((_, id) => types[id] === USER_DEFINED).sort((a, b) => b.length - a.length);
    this.control = new RegExp(`(${this.whole.map((piece) => piece.replace(/[^\w]/g, "\\$&")).join("|")})`);
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
    return ids[0] === this.bos ? ids : [this.bos, ...ids];
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
    return symbols.flatMap(({ text }) => this.ids.get(text) ?? [...new TextEncoder().encode(text)].map((byte) => this.bytes.get(byte)));
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
    if (!this.isByte(id)) return this.pieces[id].replaceAll("▁", " ");
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
