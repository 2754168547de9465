"use strict";
// Elements, numbers and plots of both pages: the server's, and docs/playground of the site.

const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A token's text as one can see it.
function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "(nothing)";
}

// A list item with a token and its probability. go: what its button does, if it is one.
function choiceRow(name, p, largest, isChosen, go) {
  const fill = make("span", { className: "fill" });
  fill.style.width = `${Math.min(100, (100 * p) / largest)}%`;
  const row = make(go ? "button" : "div", { className: `choice${isChosen ? " chosen" : ""}` });
  row.append(make("b", { textContent: name, title: name }), make("span", { className: "track" }, fill), make("span", { textContent: percent(p) }));
  if (go) {
    row.type = "button";
    row.setAttribute("aria-label", `${name}, ${percent(p)}: go on from here with it`);
    row.onclick = go;
  }
  return make("li", {}, row);
}

// -- numbers ----------------------------------------------------------------------------------------------------------

function seconds(value) {
  if (value == null) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  return value < 99.95 ? `${value.toFixed(1)} s` : `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
}

function percent(share) {
  const value = share * 100;
  return value >= 99.95 || value === 0 ? `${Math.round(value)}%` : value >= 10 ? `${value.toFixed(0)}%` : value >= 0.1 ? `${value.toFixed(1)}%` : "<0.1%";
}

const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// -- plots ------------------------------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The canvas's context, with CSS pixels as units, cleared; and its width.
function prepare(canvas, height) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

// Lets a plot be read with the pointer and the arrow keys. at(x, y): what is there; move(key): what is next to it.
function readable(canvas, at, move, draw) {
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    at(event.clientX - box.left, event.clientY - box.top);
    draw();
  };
  canvas.onpointermove = point;
  canvas.onpointerdown = point;
  canvas.onkeydown = (event) => {
    if (!/^(Arrow|Home|End|Escape)/.test(event.key)) return;
    event.preventDefault();
    move(event.key);
    draw();
  };
}

const clamp = (value, high) => Math.max(0, Math.min(high, value));
