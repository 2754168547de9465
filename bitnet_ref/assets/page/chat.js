"use strict";
// The chat view: the messages of the conversation that is open, and the reply that is being written.

let chatting = false;

function showChatState() {
  const chats = model?.chats ?? true;
  $("chat-none").hidden = chats;
  $("chat-form").hidden = $("messages").hidden = !chats;
  $("chat-empty").hidden = !chats || conversation.nodes.length > 0;
  for (const button of document.querySelectorAll(".actions button, #chat-new, #conversation-list .title")) button.disabled = chatting;
}

function showConversation() {
  const path = shownPath();
  $("messages").replaceChildren(...path.map((at, place) => showMessage(at, place === path.length - 1)));
  if (problem) $("messages").append(make("p", { className: "problem", role: "alert", textContent: problem }));
  listConversations();
  showChatState();
}

function showMessage(index, isLast) {
  const { role, content, reasoning, calls, facts, model: name } = conversation.nodes[index];
  const who = make("span", { className: "who", textContent: AUTHORS[role] ?? name });
  const text = make("div", { className: "text" });
  const element = make("div", { className: `message ${role === "tool" ? "user" : role}` }, who);
  if (role === "assistant") showMarkdown(text, content);
  else text.textContent = content;
  if (reasoning) element.append(thinkingOf(reasoning));
  element.append(text, ...(calls ?? []).map(describeCall), make("span", { className: "facts", textContent: facts ?? "" }));
  element.append(actionsOf(index, isLast, element, text));
  if (isLast && calls?.length) element.append(resultForm(index, calls));
  return element;
}

function thinkingOf(reasoning) {
  return make("details", { className: "thinking" }, make("summary", { textContent: "Thinking" }), make("div", { className: "text", textContent: reasoning }));
}

function describeCall(call) {
  return make("div", { className: "text" }, codeBlock(call.function.arguments, call.function.name));
}

function actionsOf(index, isLast, element, text) {
  const node = conversation.nodes[index], all = siblings(index), place = all.indexOf(index);
  const row = make("div", { className: "actions" });
  const copy = smallButton("Copy", () => copyText(node.content, copy), "Copy the message");
  row.append(copy);
  if (node.role !== "tool") row.append(smallButton("Edit", () => edit(index, element, text)));
  if (node.role === "assistant") row.append(smallButton("Another reply", () => reply(node.parent)));
  else if (isLast) row.append(smallButton("Reply", () => reply(index)));
  if (all.length > 1) {
    const go = (step) => () => {
      conversation.chosen[node.parent] = all[place + step];
      problem = "";
      keepConversation();
      showConversation();
      $("chat-status").textContent = `Branch ${place + step + 1} of ${all.length}`;
      const at = shownPath().indexOf(all[place + step]); // the same button, or the other one at the end
      const buttons = $("messages").children[at].querySelectorAll(".branch:not([hidden])");
      (buttons[step > 0 ? buttons.length - 1 : 0] ?? buttons[0])?.focus();
    };
    const back = smallButton("‹", go(-1), "Previous branch"), on = smallButton("›", go(1), "Next branch");
    back.classList.add("branch");
    on.classList.add("branch");
    back.hidden = place === 0;
    on.hidden = place === all.length - 1;
    row.append(back, make("span", { className: "facts", textContent: `${place + 1}/${all.length}` }), on);
  }
  return row;
}

// A changed message is a new branch, with the calls of the old one; one of a person gets a reply.
function edit(index, element, text) {
  const { parent, facts, ...node } = conversation.nodes[index]; // facts: how fast the old text was written
  const field = make("textarea", { value: node.content, rows: 3, "aria-label": "The message, changed" });
  const end = () => {
    showConversation();
    $("chat-text").focus();
  };
  const save = () => {
    const content = field.value.trim();
    if ((!content && !node.calls) || content === node.content) return end();
    const at = addNode(parent, { ...node, content });
    keepConversation();
    end();
    if (node.role === "user") reply(at);
  };
  field.onkeydown = (event) => {
    if (event.key === "Escape") end();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  text.replaceChildren(field, make("div", { className: "row" }, smallButton("Save as a branch", save), smallButton("Cancel", end)));
  element.querySelector(".actions").remove();
  field.focus();
}

// Where a person writes what the tools returned.
function resultForm(index, calls) {
  const fields = calls.map((call) => make("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.function.name}`, placeholder: `Result of ${call.function.name}` }));
  const form = make("form", {}, ...fields, make("button", { className: "plain small", textContent: "Send the results" }));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (chatting || !model || !readChatSettings()) return;
    const last = calls.reduce((parent, call, at) => addNode(parent, { role: "tool", content: fields[at].value, call: call.id }), index);
    reply(last);
  };
  return form;
}

// Changes the page; it stays at its end if it was there.
function following(change) {
  const follows = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
  change();
  if (follows) scrollTo(0, document.documentElement.scrollHeight);
}

// The messages to the one at `index`, for the server.
function messagesTo(index) {
  const messages = [];
  for (let at = index; at >= 0; at = conversation.nodes[at].parent) {
    const { role, content, calls, call } = conversation.nodes[at];
    messages.unshift({ role, content, ...(calls ? { tool_calls: calls } : {}), ...(call ? { tool_call_id: call } : {}) });
  }
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

// Adds a stream's piece to a message.
function addDelta(node, delta) {
  node.content += delta?.content ?? "";
  if (delta?.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  for (const { index, id, function: part } of delta?.tool_calls ?? []) {
    node.calls ??= [];
    node.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    node.calls[index].function.name += part.name ?? "";
    node.calls[index].function.arguments += part.arguments ?? "";
  }
}

// Writes a reply to the message at `index`, beside the replies that it has.
async function reply(index) {
  const settings = readSettings({}), chat = readChatSettings();
  if (!settings || !chat || chatting || !model) return;
  chatting = true;
  problem = "";
  keepConversation();
  const earlier = conversation.chosen[index];
  delete conversation.chosen[index];
  showConversation();
  const node = { role: "assistant", content: "", model: model.id }, pace = new Pace();
  const text = make("div", { className: "text" }), place = make("div");
  const element = make("div", { className: "message assistant busy" }, make("span", { className: "who", textContent: model.id }), place, text);
  following(() => $("messages").append(element));
  $("chat-status").textContent = "The reply is being written.";
  let isDue = false;
  const draw = () => {
    isDue = false;
    following(() => {
      if (node.reasoning && !place.firstChild) place.append(thinkingOf(node.reasoning));
      if (node.reasoning) place.querySelector(".text").textContent = node.reasoning;
      showMarkdown(text, node.content);
    });
  };
  const body = { model: model.id, messages: messagesTo(index), stream: true, stream_options: { include_usage: true }, ...settings, ...chat };
  try {
    await whileRunning($("chat-send"), $("chat-stop"), async (signal) => {
      for await (const event of readEvents("/v1/chat/completions", body, signal)) {
        pace.add(event);
        addDelta(node, event.choices[0]?.delta);
        if (!isDue) requestAnimationFrame(draw);
        isDue = true;
      }
    });
  } catch (error) {
    problem = explain(error);
  }
  node.facts = String(pace);
  if (node.content || node.reasoning || node.calls) addNode(index, node);
  else if (earlier !== undefined) conversation.chosen[index] = earlier;
  chatting = false;
  keepConversation();
  following(showConversation);
  $("chat-status").textContent = problem ? "" : node.content || "The reply has no text.";
  const isFree = [document.body, $("chat-send")].includes(document.activeElement); // else it is where a person goes on
  if (isFree && !$("chat").hidden && wide.matches) $("chat-text").focus();
}

$("chat-form").onsubmit = (event) => {
  event.preventDefault();
  const content = $("chat-text").value.trim(), last = shownPath().at(-1) ?? -1;
  if (!content || chatting || !model || !readChatSettings()) return;
  $("chat-text").value = "";
  const isUnanswered = conversation.nodes[last]?.role === "user"; // then this one stands in its place
  const index = addNode(isUnanswered ? conversation.nodes[last].parent : last, { role: "user", content });
  reply(index);
  scrollTo(0, document.documentElement.scrollHeight);
};
$("chat-text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat-form").requestSubmit();
};
$("go-complete").onclick = () => {
  show("completion");
  $("prompt").focus();
};
$("skip").onclick = (event) => {
  event.preventDefault();
  $(view === "chat" ? "chat-text" : view === "completion" ? "prompt" : "steps").focus();
};
