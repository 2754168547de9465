"use strict";
// Conversations as trees of messages, kept in this browser: one entry of its local storage for each.

const PREFIX = "bitnet_ref chat ";
const MAX_KEPT = 100;
const AUTHORS = { user: "You", tool: "Result" }; // a reply has its model's name

// nodes: {role, content, parent, ...}, parent: an index, -1 for the first. chosen: the child shown after each node.
function newConversation() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, title: "", system: "", changed: 0, nodes: [], chosen: {} };
}

let conversation = newConversation();
let problem = ""; // why there is no reply to the last message

// The indices of the messages that are shown, from the first to the last.
function shownPath() {
  const path = [];
  for (let at = conversation.chosen[-1]; at !== undefined; at = conversation.chosen[at]) path.push(at);
  return path;
}

const siblings = (index) => conversation.nodes.flatMap((node, at) => (node.parent === conversation.nodes[index].parent ? [at] : []));

function addNode(parent, node) {
  conversation.nodes.push({ ...node, parent });
  conversation.chosen[parent] = conversation.nodes.length - 1;
  return conversation.nodes.length - 1;
}

// Writes the conversation. Where the browser has no room, the oldest ones leave.
function keepConversation() {
  if (!conversation.nodes.length) return;
  const kept = keptConversations(), before = kept.find(({ id }) => id === conversation.id);
  if (before && before.changed !== conversation.changed) { // another tab went on with it: this is a copy from here on
    conversation.id = newConversation().id;
    tabStorage.setItem("bitnet_ref open", conversation.id);
  }
  conversation.changed = Date.now();
  conversation.title ||= Array.from(conversation.nodes[0].content.trim().replace(/\s+/g, " ")).slice(0, 60).join("");
  const others = kept.filter(({ id }) => id !== conversation.id);
  for (const { id } of others.splice(MAX_KEPT - 1)) browserStorage.removeItem(PREFIX + id);
  for (;;) {
    try {
      browserStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return;
    } catch {
      if (!others.length) return say("This browser has no room to keep this conversation. Export it.");
      browserStorage.removeItem(PREFIX + others.pop().id);
    }
  }
}

function isConversation(value) {
  const isNode = (node, at) => typeof node?.content === "string" && Number.isInteger(node.parent) && node.parent < at;
  const isNext = ([from, to]) => value.nodes[to]?.parent === Number(from);
  return Array.isArray(value?.nodes) && value.nodes.every(isNode) && typeof value.chosen === "object" && Object.entries(value.chosen).every(isNext);
}

// The newest first; an entry that is no conversation is left out.
function keptConversations() {
  const kept = [];
  for (const key of Object.keys(browserStorage).filter((each) => each.startsWith(PREFIX))) {
    try {
      const value = JSON.parse(browserStorage.getItem(key));
      if (isConversation(value)) kept.push({ ...value, id: key.slice(PREFIX.length) });
    } catch {} // of another version, or cut
  }
  return kept.sort((a, b) => b.changed - a.changed);
}

function openConversation(value) {
  conversation = value;
  problem = "";
  $("system").value = conversation.system;
  tabStorage.setItem("bitnet_ref open", conversation.id);
  showConversation();
}

function listConversations() {
  const rows = keptConversations().map((each) => {
    const isOpen = each.id === conversation.id;
    const title = make("button", { type: "button", className: "title", textContent: each.title, title: each.title });
    title.setAttribute("aria-current", String(isOpen));
    title.onclick = () => {
      if (chatting) return;
      openConversation(each);
      focusTitle();
    };
    const row = make("li", {}, title);
    if (isOpen) row.append(smallButton("Rename", () => rename(row)), deleteButton());
    return row;
  });
  $("conversation-list").replaceChildren(...rows);
  $("export").hidden = !conversation.nodes.length;
}

function focusTitle() {
  document.querySelector("#conversation-list [aria-current=true]")?.focus();
}

function smallButton(text, action, label = text) {
  const button = make("button", { type: "button", className: "plain small", textContent: text, onclick: action });
  button.setAttribute("aria-label", label);
  return button;
}

function rename(row) {
  const field = make("input", { value: conversation.title, maxLength: 100, "aria-label": "Title" });
  let isKept = true;
  field.onblur = () => {
    if (isKept && field.value.trim()) conversation.title = field.value.trim();
    keepConversation();
    listConversations();
  };
  field.onkeydown = (event) => {
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
    event.preventDefault(); // else Enter presses the button that gets the focus
    isKept = event.key === "Enter";
    field.blur();
    focusTitle();
  };
  row.replaceChildren(field);
  field.select();
}

// It deletes when it is pressed a second time.
function deleteButton() {
  const button = smallButton("Delete", () => {
    if (chatting) return;
    if (button.textContent === "Delete") {
      button.textContent = "Really?";
      button.setAttribute("aria-label", "Really delete it?");
      return;
    }
    browserStorage.removeItem(PREFIX + conversation.id);
    openConversation(newConversation());
    $("chat-new").focus();
  });
  button.onblur = () => (button.textContent = "Delete");
  return button;
}

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// The messages that are shown, as Markdown.
function asMarkdown() {
  const parts = shownPath().map((at) => {
    const { role, content, model: name, calls } = conversation.nodes[at];
    const called = (calls ?? []).map((call) => `\`${call.function.name}(${call.function.arguments})\``);
    return [`## ${AUTHORS[role] ?? name}`, content, ...called].filter(Boolean).join("\n\n");
  });
  return [`# ${conversation.title}`, ...(conversation.system ? [`> ${conversation.system.replaceAll("\n", "\n> ")}`] : []), ...parts, ""].join("\n\n");
}

$("export-json").onclick = () => download("conversation.json", "application/json", JSON.stringify(conversation, null, 1));
$("export-markdown").onclick = () => download("conversation.md", "text/markdown", asMarkdown());
$("chat-new").onclick = () => {
  if (chatting) return;
  openConversation(newConversation());
  $("chat-text").focus();
};
$("system").oninput = () => {
  conversation.system = $("system").value;
  keepConversation();
};
// Another tab has written. What it made of the open conversation is shown, unless a message is being changed here.
addEventListener("storage", ({ key }) => {
  if (chatting) return;
  const other = key === PREFIX + conversation.id && keptConversations().find(({ id }) => id === conversation.id);
  if (other && !$("messages").contains(document.activeElement)) openConversation(other);
  else listConversations();
});
addEventListener("DOMContentLoaded", () => {
  const id = tabStorage.getItem("bitnet_ref open"), kept = keptConversations();
  openConversation(kept.find((each) => each.id === id) ?? (id ? newConversation() : (kept[0] ?? newConversation())));
});
