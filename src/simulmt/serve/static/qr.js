/** QR codes (ISO/IEC 18004): bytes, error correction level M, versions 1 to 10. */

/** By version: error correction codewords per block, and number of blocks. */
const CORRECTION = [10, 16, 26, 18, 24, 16, 18, 22, 22, 26];
const BLOCKS = [1, 1, 1, 2, 2, 4, 4, 4, 5, 5];
const CODEWORDS = [26, 44, 70, 100, 134, 172, 196, 242, 292, 346];
/** By version: rows and columns of the centres of the alignment patterns. */
const ALIGNMENT = [[], [6, 18], [6, 22], [6, 26], [6, 30], [6, 34], [6, 22, 38], [6, 24, 42], [6, 26, 46], [6, 28, 50]];
const LEVEL_M = 0;

const MASKS = [
  (row, column) => (row + column) % 2 === 0,
  (row) => row % 2 === 0,
  (_, column) => column % 3 === 0,
  (row, column) => (row + column) % 3 === 0,
  (row, column) => (Math.floor(row / 2) + Math.floor(column / 3)) % 2 === 0,
  (row, column) => ((row * column) % 2) + ((row * column) % 3) === 0,
  (row, column) => (((row * column) % 2) + ((row * column) % 3)) % 2 === 0,
  (row, column) => (((row + column) % 2) + ((row * column) % 3)) % 2 === 0,
];

/** @typedef {boolean[][]} Matrix rows of modules, true for dark */

/** @param {string} text @param {number | null} mask the best one for null @returns {Matrix} */
export function qrCode(text, mask = null) {
  const bytes = new TextEncoder().encode(text);
  const version = CODEWORDS.findIndex((_, index) => bytes.length <= capacity(index + 1)) + 1;
  if (version === 0) throw new RangeError(`${bytes.length} bytes are too many for a QR code`);
  const codewords = interleave(blocks(dataCodewords(bytes, version), version));
  const candidates = MASKS.map((_, index) => index).filter((index) => mask === null || index === mask);
  const matrices = candidates.map((index) => draw(codewords, version, index));
  const penalties = matrices.map(penalty);
  return matrices[penalties.indexOf(Math.min(...penalties))];
}

/** A QR code as an image, with the quiet zone around it. @param {string} text */
export function qrImage(text) {
  const matrix = qrCode(text);
  const size = matrix.length + 8;
  const dots = matrix.flatMap((row, y) => row.map((isDark, x) => (isDark ? `M${x + 4} ${y + 4}h1v1h-1z` : "")));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS(svg.namespaceURI, "path");
  svg.setAttribute("viewBox", `0 0 ${size} ${size}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `QR code of ${text}`);
  svg.setAttribute("shape-rendering", "crispEdges");
  path.setAttribute("d", dots.join(""));
  svg.append(path);
  return svg;
}

/** @param {number} version */
function dataLength(version) {
  return CODEWORDS[version - 1] - CORRECTION[version - 1] * BLOCKS[version - 1];
}

/** Return the width of the byte count field in bits. @param {number} version */
function countBits(version) {
  return version < 10 ? 8 : 16;
}

/** @param {number} version */
function capacity(version) {
  return Math.floor((8 * dataLength(version) - 4 - countBits(version)) / 8);
}

/** @param {Uint8Array} bytes @param {number} version */
function dataCodewords(bytes, version) {
  const length = dataLength(version);
  let bits = "0100" + binary(bytes.length, countBits(version));
  bits += [...bytes].map((byte) => binary(byte, 8)).join("");
  bits += "0".repeat(Math.min(4, 8 * length - bits.length));
  bits += "0".repeat((8 - (bits.length % 8)) % 8);
  const codewords = bits.match(/.{8}/g).map((byte) => Number.parseInt(byte, 2));
  for (let pad = 0; codewords.length < length; pad += 1) codewords.push(pad % 2 ? 0x11 : 0xec);
  return codewords;
}

/** @param {number} value @param {number} width */
function binary(value, width) {
  return value.toString(2).padStart(width, "0");
}

/** Cut data into blocks, the shorter ones first, each with its error correction.
 *  @param {number[]} data @param {number} version */
function blocks(data, version) {
  const count = BLOCKS[version - 1];
  const shorter = count - (data.length % count);
  const generator = generatorPolynomial(CORRECTION[version - 1]);
  const result = [];
  for (let start = 0; result.length < count; ) {
    const length = Math.floor(data.length / count) + (result.length < shorter ? 0 : 1);
    const block = data.slice(start, start + length);
    result.push({ data: block, correction: remainder(block, generator) });
    start += length;
  }
  return result;
}

/** @param {{data: number[], correction: number[]}[]} blocks */
function interleave(blocks) {
  const columns = (rows) => {
    const longest = Math.max(...rows.map((row) => row.length));
    return Array.from({ length: longest }, (_, index) => rows.map((row) => row[index])).flat();
  };
  const data = columns(blocks.map(({ data }) => data));
  const correction = columns(blocks.map(({ correction }) => correction));
  return [...data, ...correction].filter((codeword) => codeword !== undefined);
}

/** The product of two elements of GF(256) with the modulus x^8 + x^4 + x^3 + x^2 + 1. */
function multiply(one, other) {
  let product = 0;
  for (let bit = 7; bit >= 0; bit -= 1) {
    product = (product << 1) ^ (product >> 7 ? 0x11d : 0);
    if ((other >> bit) & 1) product ^= one;
  }
  return product;
}

/** The coefficients of (x - 1)(x - 2)(x - 4)... without the leading 1. @param {number} degree */
function generatorPolynomial(degree) {
  let polynomial = [1];
  for (let [index, root] = [0, 1]; index < degree; index += 1, root = multiply(root, 2)) {
    const shifted = [...polynomial, 0];
    polynomial = shifted.map((term, power) => term ^ (power > 0 ? multiply(polynomial[power - 1], root) : 0));
  }
  return polynomial.slice(1);
}

/** Return the remainder of the division by the generator: the error correction codewords.
 *  @param {number[]} data @param {number[]} generator */
function remainder(data, generator) {
  const result = generator.map(() => 0);
  for (const codeword of data) {
    const factor = codeword ^ result.shift();
    result.push(0);
    generator.forEach((term, index) => (result[index] ^= multiply(term, factor)));
  }
  return result;
}

/** @param {number[]} codewords @param {number} version @param {number} mask @returns {Matrix} */
function draw(codewords, version, mask) {
  const size = 17 + 4 * version;
  /** @type {(boolean | undefined)[][]} undefined where the data goes */
  const matrix = Array.from({ length: size }, () => Array(size).fill(undefined));
  drawPatterns(matrix, version);
  drawVersion(matrix, version);
  drawFormat(matrix, mask);
  drawData(matrix, codewords, MASKS[mask]);
  return matrix;
}

function drawPatterns(matrix, version) {
  const last = matrix.length - 4;
  for (const [row, column] of [[3, 3], [3, last], [last, 3]]) drawSquare(matrix, row, column, 4, [1, 3]); // finders
  const centres = ALIGNMENT[version - 1];
  for (const row of centres) {
    for (const column of centres) {
      if (matrix[row][column] === undefined) drawSquare(matrix, row, column, 2, [0, 2]);
    }
  }
  for (let index = 8; index < matrix.length - 8; index += 1) {
    matrix[6][index] = matrix[index][6] = index % 2 === 0; // timing
  }
  matrix[matrix.length - 8][8] = true;
}

/** A square that is dark within the inner distance of its centre, and in the ring at the outer one. */
function drawSquare(matrix, centreRow, centreColumn, radius, [inner, outer]) {
  for (let row = centreRow - radius; row <= centreRow + radius; row += 1) {
    for (let column = centreColumn - radius; column <= centreColumn + radius; column += 1) {
      const distance = Math.max(Math.abs(row - centreRow), Math.abs(column - centreColumn));
      if (row in matrix && column in matrix) matrix[row][column] = distance <= inner || distance === outer;
    }
  }
}

function drawVersion(matrix, version) {
  if (version < 7) return;
  const bits = (version << 12) | bchRemainder(version << 12, 0x1f25);
  for (let index = 0; index < 18; index += 1) {
    const [row, column] = [Math.floor(index / 3), matrix.length - 11 + (index % 3)];
    matrix[row][column] = matrix[column][row] = ((bits >> index) & 1) === 1;
  }
}

function drawFormat(matrix, mask) {
  const data = ((LEVEL_M << 3) | mask) << 10;
  const bits = (data | bchRemainder(data, 0x537)) ^ 0x5412;
  const size = matrix.length;
  for (let index = 0; index < 15; index += 1) {
    const isDark = ((bits >> index) & 1) === 1;
    const along = index < 6 ? index : index < 8 ? index + 1 : size - 15 + index; // down the column 8
    const across = index < 8 ? size - 1 - index : index === 8 ? 7 : 14 - index; // along the row 8, from the right
    matrix[along][8] = isDark;
    matrix[8][across] = isDark;
  }
}

/** @param {number} value @param {number} divisor of polynomials over GF(2) */
function bchRemainder(value, divisor) {
  const degree = Math.floor(Math.log2(divisor));
  let rest = value;
  for (let shift = 17 - degree; shift >= 0; shift -= 1) {
    if ((rest >> (shift + degree)) & 1) rest ^= divisor << shift;
  }
  return rest;
}

/** Fill two columns at a time from the right, upwards and downwards in turn; column 6 is the timing's. */
function drawData(matrix, codewords, mask) {
  const size = matrix.length;
  let position = 0;
  let isUpward = true;
  for (let right = size - 1; right > 0; right -= right === 8 ? 3 : 2, isUpward = !isUpward) {
    for (let step = 0; step < size; step += 1) {
      const row = isUpward ? size - 1 - step : step;
      for (const column of [right, right - 1]) {
        if (matrix[row][column] !== undefined) continue;
        const bit = (codewords[position >> 3] >> (7 - (position & 7))) & 1;
        matrix[row][column] = (bit === 1) !== mask(row, column);
        position += 1;
      }
    }
  }
}

/** Return the mask penalty, by the four rules of the standard. @param {Matrix} matrix */
function penalty(matrix) {
  const columns = matrix.map((_, index) => matrix.map((row) => row[index]));
  const lines = [...matrix, ...columns].map((line) => line.map((isDark) => (isDark ? "1" : "0")).join(""));
  const dark = matrix.flat().filter(Boolean).length / matrix.length ** 2;
  return (
    lines.reduce((sum, line) => sum + runPenalty(line) + finderPenalty(line), 0) +
    squarePenalty(matrix) +
    10 * Math.floor(Math.abs(20 * dark - 10))
  );
}

function runPenalty(line) {
  return (line.match(/0{5,}|1{5,}/g) ?? []).reduce((sum, run) => sum + run.length - 2, 0);
}

function finderPenalty(line) {
  return 40 * (line.match(/(?=10111010000|00001011101)/g) ?? []).length;
}

function squarePenalty(matrix) {
  let count = 0;
  for (let row = 1; row < matrix.length; row += 1) {
    for (let column = 1; column < matrix.length; column += 1) {
      const dark = [matrix[row][column], matrix[row - 1][column], matrix[row][column - 1], matrix[row - 1][column - 1]];
      if (dark.every((isDark) => isDark === dark[0])) count += 1;
    }
  }
  return 3 * count;
}
