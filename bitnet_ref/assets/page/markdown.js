"use strict";
// Markdown of a model as elements. A model's text is not trusted: all of it becomes text nodes of elements that are made
// here, HTML stays text, images are links, and a link goes to http, https or mailto only. Time is linear in the text.

const MAX_INLINE = 20000; // a longer paragraph stays as it is
const MAX_DEPTH = 6; // of lists and quotes in each other
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const TABLE_RULE = /^ {0,3}\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

// -- blocks -----------------------------------------------------------------------------------------------------------

// Shows `text` in `element`. Blocks that are as before stay the same elements, so a stream disturbs only its last one.
function showMarkdown(element, text) {
  const blocks = splitBlocks(text.split(/\r\n?|\n/), 0);
  const before = element.blocks ?? [];
  let same = 0;
  while (same < blocks.length && before[same]?.source === blocks[same].source) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => block.build()));
  element.blocks = blocks;
}

const isBlank = (line) => line.trim() === "";

function startsBlock(lines, at) {
  const line = lines[at];
  return [FENCE, ITEM, HEADING, QUOTE, RULE].some((form) => form.test(line)) || startsTable(lines, at);
}

const startsTable = (lines, at) => lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "");

// lines -> [{source, build}]: the text of each block and what makes its element
function splitBlocks(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [end, build] = readBlock(lines, at, depth);
    blocks.push({ source: `${build.name} ${lines.slice(at, end).join("\n")}`, build });
    at = end;
  }
  return blocks;
}

// The line after the block that begins at `at`, and what makes its element.
function readBlock(lines, at, depth) {
  const fence = FENCE.exec(lines[at]);
  if (fence) return readFence(lines, at, fence);
  const heading = HEADING.exec(lines[at]);
  if (heading) {
    const text = (heading[2] ?? "").trim().replace(/(?:^| )#+$/, "").trimEnd();
    return [at + 1, () => withInline(`h${Math.min(6, heading[1].length + 2)}`, text)];
  }
  if (RULE.test(lines[at])) return [at + 1, () => make("hr")];
  if (depth < MAX_DEPTH && QUOTE.test(lines[at])) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(lines[at])) return readList(lines, at, depth);
  if (startsTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth >= MAX_DEPTH || !startsBlock(lines, end))) end += 1;
  return [end, () => withInline("p", lines.slice(at, end).map((line) => line.trimStart()).join("\n"))];
}

// Code to its closing fence; without one, as in a text that is still written, to the end.
function readFence(lines, at, [, mark, info]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => codeBlock(code, info.trim().split(/\s/)[0])];
}

function codeBlock(code, language) {
  const copy = smallButton("Copy", () => copyText(code, copy), `Copy the ${language} code`.replace("  ", " "));
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }), copy);
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, make("code", { textContent: code })));
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => make("blockquote", {}, ...splitBlocks(inner, depth + 1).map((block) => block.build()))];
}

// Items are of one kind, bullets or numbers. What is indented further than an item's mark belongs to the item.
function readList(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isNumbered = mark.length > 1;
  const items = [];
  let end = at, width = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end], item = ITEM.exec(line);
    const depthOfLine = line.length - line.trimStart().length;
    if (end === at || (item && depthOfLine < Math.max(2, width) && !RULE.test(line))) {
      if (item[2].length > 1 !== isNumbered) break;
      width = item[0].length;
      items.push([line.slice(width)]);
    } else if (isBlank(line)) {
      const next = lines.slice(end + 1, end + 3).find((each) => !isBlank(each));
      if (next === undefined || (!ITEM.test(next) && !/^ {2}/.test(next))) break;
      items.at(-1).push("");
    } else if (depthOfLine > indent.length + 1) items.at(-1).push(line.slice(Math.min(width, depthOfLine)));
    else if (isBlank(lines[end - 1]) || startsBlock(lines, end)) break;
    else items.at(-1).push(line);
  }
  const build = () => {
    const rows = items.map((inner) => make("li", {}, ...splitBlocks(inner, depth + 1).map((block) => block.build())));
    return make(isNumbered ? "ol" : "ul", { dir: "auto", ...(isNumbered ? { start: parseInt(mark, 10) } : {}) }, ...rows);
  };
  return [end, build];
}

function readTable(lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const build = () => {
    const head = make("tr", {}, ...cells(lines[at]).map((cell) => withInline("th", cell)));
    const rows = lines.slice(at + 2, end).map((line) => make("tr", {}, ...cells(line).map((cell) => withInline("td", cell))));
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
    return make("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, table);
  };
  return [end, build];
}

// -- in a line --------------------------------------------------------------------------------------------------------

const PIECE = /\\([!-/:-@[-`{-~])|(`+)|(!?\[)|\]\( *<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,2000}\))?[^\s<>()]{0,2000})>?(?: +"[^"\n]{0,500}")? *\)|(\*{1,3}|_{1,3}|~~)|<?(https?:\/\/[^\s<>"'`[\]]{1,2000})>?|\n/g;
const TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

const withInline = (tag, text) => make(tag, {}, ...inline(text));

// The address, if a link may go there.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // not an address, or one within this server
  }
}

function link(address, children) {
  return make("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// A line's text as nodes. A mark is text until its second half is read: then what is between becomes an element.
function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  const open = []; // [mark, its place in `nodes`]: each mark once, so elements are at most a few deep
  const unclosed = new Set(); // lengths of backtick runs that come no more
  let at = 0;
  const wrap = (place, element) => {
    element.append(...nodes.splice(place + 1));
    nodes[place] = element;
    while (open.length && open.at(-1)[1] >= place) open.pop();
  };
  PIECE.lastIndex = 0;
  for (let piece; (piece = PIECE.exec(text)); at = PIECE.lastIndex) {
    const [all, escaped, ticks, bracket, address, mark, url] = piece;
    if (piece.index > at) nodes.push(text.slice(at, piece.index));
    if (escaped) nodes.push(escaped);
    else if (ticks) {
      const end = unclosed.has(ticks.length) ? null : findTicks(text, PIECE.lastIndex, ticks.length);
      if (end === null) {
        unclosed.add(ticks.length);
        nodes.push(all);
      } else {
        nodes.push(make("code", { textContent: text.slice(PIECE.lastIndex, end).replace(/^ (.*[^ ].*) $/s, "$1") }));
        PIECE.lastIndex = end + ticks.length;
      }
    } else if (bracket) {
      const earlier = open.findIndex(([each]) => each === "[");
      if (earlier >= 0) open.splice(earlier, 1); // the inner bracket is the link's
      open.push(["[", nodes.length]);
      nodes.push(bracket);
    } else if (address !== undefined) {
      const begin = open.find(([each]) => each === "["), safe = safeAddress(address);
      if (begin && safe) wrap(begin[1], link(safe, []));
      else nodes.push(all);
    } else if (mark) addMark(text, piece, nodes, open, wrap);
    else if (url) addUrl(url, nodes, open);
    else nodes.push(make("br"));
  }
  nodes.push(text.slice(at));
  return nodes;
}

function addMark(text, { 0: mark, index }, nodes, open, wrap) {
  const before = text[index - 1] ?? " ", after = text[index + mark.length] ?? " ";
  const isInWord = mark[0] === "_" && /\w/.test(before) && /\w/.test(after);
  const begin = open.find(([each]) => each === mark);
  if (begin && !/\s/.test(before) && !isInWord) {
    const [outer, inner] = mark === "~~" ? ["del"] : TAGS[mark.length];
    const element = make(outer);
    wrap(begin[1], inner ? make(inner) : element);
    if (!inner) return;
    element.append(nodes[begin[1]]);
    nodes[begin[1]] = element;
    return;
  }
  if (!begin && !/\s/.test(after) && !isInWord) open.push([mark, nodes.length]);
  nodes.push(mark);
}

function addUrl(url, nodes, open) {
  const address = url.replace(/[.,;:!?)\]*_~]+$/, ""), safe = safeAddress(address);
  const isInLink = open.some(([each]) => each === "[");
  nodes.push(...(safe && !isInLink ? [link(safe, [address])] : [address]));
  nodes.push(url.slice(address.length));
}

// Where a run of exactly `length` backticks begins; null without one.
function findTicks(text, from, length) {
  const run = /`+/g;
  run.lastIndex = from;
  for (let each; (each = run.exec(text)); ) if (each[0].length === length) return each.index;
  return null;
}

// -- the clipboard ----------------------------------------------------------------------------------------------------

// Copies a text, and says so on the button for a moment.
async function copyText(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // a page that is not by https or from this machine has no clipboard
  }
  const name = button.dataset.name ?? button.textContent;
  button.dataset.name = name;
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = name), 1500);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = make("textarea", { className: "sr", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}
