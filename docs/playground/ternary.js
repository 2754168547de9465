// The product that BitNet b1.58 is about: int8 activations times a matrix of -1, 0 and +1. Exact integers, computed by
// WebAssembly with SIMD, and once more by plain JavaScript, which it must equal.
//
// A matrix at rest: rows of blocks of 64 weights in 16 bytes. Weight j of a block is in byte j % 16, at bit 2 (j // 16), as
// w + 1. The weights after the last of a row meet activations of 0, so they may be anything.

export const BLOCK = 64, BLOCK_BYTES = 16;
const PAGE = 65536, MAX_PAGES = 65536; // of a WebAssembly memory: 4 GB

export class TernaryMatrices {
  // Raises WebAssembly's CompileError where the browser has no SIMD.
  constructor() {
    this.memory = new WebAssembly.Memory({ initial: 1, maximum: MAX_PAGES });
    this.end = 0;
    const { exports } = new WebAssembly.Instance(new WebAssembly.Module(kernel()), { page: { memory: this.memory } });
    this.multiply = exports.multiply;
    this.room = { x: 0, out: 0, inputs: 0, outputs: 0 };
  }

  // So many bytes more, as an address.
  reserve(bytes) {
    const at = this.end, end = at + Math.ceil(bytes / BLOCK_BYTES) * BLOCK_BYTES;
    const missing = Math.ceil((end - this.memory.buffer.byteLength) / PAGE);
    if (missing > 0) this.memory.grow(missing);
    this.end = end;
    return at;
  }

  // codes (rows x columns) of 0, 1 and 2 -> {at, rows, columns, blocks}
  add(codes, rows, columns) {
    const blocks = Math.ceil(columns / BLOCK), at = this.reserve(rows * blocks * BLOCK_BYTES);
    const packed = new Uint8Array(this.memory.buffer, at, rows * blocks * BLOCK_BYTES);
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        const place = column % BLOCK, byte = (row * blocks + (column - place) / BLOCK) * BLOCK_BYTES + (place % BLOCK_BYTES);
        packed[byte] |= codes[row * columns + column] << (2 * (place >> 4));
      }
    if (blocks * BLOCK > this.room.inputs) Object.assign(this.room, { inputs: blocks * BLOCK, x: this.reserve(blocks * BLOCK) });
    if (rows > this.room.outputs) Object.assign(this.room, { outputs: rows, out: this.reserve(4 * rows) });
    return { at, rows, columns, blocks };
  }

  // x (columns) int8 -> (rows) int32, by WebAssembly. The result is overwritten by the next product.
  product({ at, rows, blocks }, x) {
    const inputs = new Int8Array(this.memory.buffer, this.room.x, blocks * BLOCK);
    inputs.fill(0);
    inputs.set(x);
    // The codes are w + 1, so the sum of x is taken off.
    this.multiply(at, this.room.x, this.room.out, rows, blocks, x.reduce((sum, value) => sum + value, 0));
    return new Int32Array(this.memory.buffer, this.room.out, rows);
  }

  // The same, by plain JavaScript.
  plainProduct({ at, rows, blocks }, x) {
    const packed = new Uint8Array(this.memory.buffer, at, rows * blocks * BLOCK_BYTES), out = new Int32Array(rows);
    const inputs = new Int8Array(blocks * BLOCK);
    inputs.set(x);
    for (let row = 0, byte = 0; row < rows; row++)
      for (let first = 0; first < inputs.length; first += BLOCK)
        for (let j = first; j < first + BLOCK_BYTES; j++, byte++)
          for (let part = 0; part < 4; part++) out[row] += inputs[j + part * BLOCK_BYTES] * (((packed[byte] >> (2 * part)) & 3) - 1);
    return out;
  }

  // Whether both give the same integers, for inputs of all sizes that int8 has.
  isExact(matrix) {
    const x = Int8Array.from({ length: matrix.columns }, (_, i) => (i * 73 + matrix.rows) % 256); // wraps to -128 ... 127
    const fast = this.product(matrix, x);
    return this.plainProduct(matrix, x).every((value, i) => value === fast[i]);
  }
}

// -- the kernel, as a WebAssembly module ------------------------------------------------------------------------------
//
//   multiply(w, x, out, rows, blocks, taken):
//     for each row: acc = 0; for each block: acc += codes . x, 64 at a time; out = sum of acc - taken
//
// A block's products are summed in int16: eight of at most 2 * 128 meet in a lane.

const I32 = 0x7f, V128 = 0x7b;
const [W, X, OUT, ROWS, BLOCKS, TAKEN, P, I, ACC, PART, BYTES, CODES, XS] = Array(13).keys(); // locals
const get = (local) => [0x20, local], set = (local) => [0x21, local];
const int = (value) => [0x41, ...signed(value)], add = 0x6a, subtract = 0x6b, branchIf = 0x0d, end = 0x0b;
const loop = [0x03, 0x40];
const simd = (code, ...rest) => [0xfd, ...unsigned(code), ...rest];
const loadVector = (offset) => simd(0x00, 0, ...unsigned(offset)), zeros = simd(0x0c, ...Array(16).fill(0)), threes = simd(0x0c, ...Array(16).fill(3));
const and = simd(0x4e), shiftBytes = simd(0x6d), timesLow = simd(0x9c), timesHigh = simd(0x9d), addShorts = simd(0x8e);
const addPairs = simd(0x7e), addInts = simd(0xae), lane = (i) => simd(0x1b, i);
const advance = (local, by) => [...get(local), ...int(by), add, ...set(local)];

function kernel() {
  const quarter = (s) => [
    ...[...get(BYTES), ...int(2 * s), ...shiftBytes, ...threes, ...and, ...set(CODES)],
    ...[...get(P), ...loadVector(16 * s), ...set(XS)],
    ...[...get(CODES), ...get(XS), ...timesLow, ...get(CODES), ...get(XS), ...timesHigh, ...addShorts],
    ...[...get(PART), ...addShorts, ...set(PART)],
  ];
  const block = [
    ...[...get(W), ...loadVector(0), ...set(BYTES), ...zeros, ...set(PART)],
    ...[0, 1, 2, 3].flatMap(quarter),
    ...[...get(PART), ...addPairs, ...get(ACC), ...addInts, ...set(ACC)],
    ...[...advance(W, BLOCK_BYTES), ...advance(P, BLOCK)],
  ];
  const again = (local) => [...advance(local, -1), ...get(local), branchIf, 0, end];
  const sum = [0, 1, 2, 3].flatMap((i) => [...get(ACC), ...lane(i), ...(i ? [add] : [])]);
  const body = [
    ...[...loop, ...zeros, ...set(ACC), ...get(X), ...set(P), ...get(BLOCKS), ...set(I)],
    ...[...loop, ...block, ...again(I)],
    ...[...get(OUT), ...sum, ...get(TAKEN), subtract, 0x36, 2, 0], // i32.store
    ...[...advance(OUT, 4), ...again(ROWS), end],
  ];
  const section = (id, ...content) => [id, ...unsigned(content.length), ...content];
  const text = (name) => [name.length, ...new TextEncoder().encode(name)];
  const code = [2, 2, I32, XS - I, V128, ...body]; // the locals after the parameters, and the function
  return Uint8Array.from([
    ...[0, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    ...section(1, 1, 0x60, 6, ...Array(6).fill(I32), 0), // the type of the function
    ...section(2, 1, ...text("page"), ...text("memory"), 2, 1, 1, ...unsigned(MAX_PAGES)),
    ...section(3, 1, 0),
    ...section(7, 1, ...text("multiply"), 0, 0),
    ...section(10, 1, ...unsigned(code.length), ...code),
  ]);
}

function unsigned(value) {
  return value < 128 ? [value] : [(value & 127) | 128, ...unsigned(value >>> 7)];
}

function signed(value) {
  return value >= -64 && value < 64 ? [value & 127] : [(value & 127) | 128, ...signed(value >> 7)];
}
