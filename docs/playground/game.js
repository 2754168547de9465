// "Can you see the bug?": two texts, one by a model with a mistake. Five rounds, and a score of those that can be seen.

import { SCALE, VISIBLE, mean, pause, shorten, state, work, writeOn } from "./main.js";
import { Model, divergence, uniforms } from "./model.js";

const ROUNDS = 5, TOKENS = 32, SAMPLING = { temperature: 0.6, top_k: 40 };
const BEGINNINGS = ["Once upon a time", "The king said", "In the middle of the wood", "Alice looked", "The old woman", "When the sun rose", "There was a little"];
const game = (state.game = { round: 0, score: 0, counted: 0, missed: [], broken: "", bug: null });
const CHOICES = ["a", "b", "none"];
const pick = (list) => list[Math.floor(Math.random() * list.length)];
let drawn = []; // the mistakes of this game, each once

// A mistake that this game has not had. An invisible one comes at most once, and not first.
function pickBug() {
  const isFull = !drawn.length || drawn.some((each) => each.invisible);
  return pick(state.facts.bugs.filter((each) => !drawn.includes(each) && !(isFull && each.invisible)));
}

// A beginning with what the model writes after it, up to its last whole word.
async function writeText(model, given, draws) {
  const reading = await model.read(given);
  for await (const _ of writeOn(reading, TOKENS, draws, SAMPLING));
  return { reading, text: `${state.tokenizer.decode(reading.ids).replace(/\s+\S*$/, "")} ...` };
}

// The text of the right model and that of a broken one, which also reads the right one's text.
async function writeBoth(bug) {
  const given = state.tokenizer.encode(pick(BEGINNINGS)), seed = Math.floor(Math.random() * 2 ** 32);
  const right = await writeText(state.model, given, uniforms(seed)), model = await Model.open(state.ort, state.graphs[bug.name], state.weights, state.facts.config);
  try {
    return { right, wrong: await writeText(model, given, uniforms(seed)), same: await model.read(right.reading.ids) };
  } finally {
    await model.close();
  }
}

async function play() {
  if (game.round === ROUNDS) Object.assign(game, { round: 0, score: 0, counted: 0, missed: [] });
  if (game.round === 0) drawn = [];
  $("game-next").hidden = true;
  $("game-answer").textContent = "They are writing.";
  await pause();
  let bug, right, wrong, same;
  do {
    bug = pickBug();
    ({ right, wrong, same } = await writeBoth(bug));
  } while (right.text === wrong.text); // no round
  drawn.push(bug);
  const nats = right.reading.logits.map((logits, i) => divergence(logits, same.logits[i]));
  const broken = pick(["a", "b"]), texts = { [broken]: wrong.text, [broken === "a" ? "b" : "a"]: right.text };
  Object.assign(game, { round: game.round + 1, broken, bug, nats: mean(nats) });
  for (const side of ["a", "b"]) {
    $(`name-${side}`).textContent = `Text ${side.toUpperCase()}`;
    $(`game-${side}`).textContent = shorten(texts[side]);
  }
  for (const choice of CHOICES) $(`choose-${choice}`).hidden = false;
  $("game-texts").hidden = false;
  $("game-answer").textContent = `Round ${game.round} of ${ROUNDS}. Which one is broken?`;
  setTimeout(() => $("choose-a").focus({ preventScroll: true })); // when the buttons are enabled again
}

// choice: "a", "b", or "none" where the reader cannot tell
function answer(choice) {
  const { bug, broken, nats } = game, isRight = choice === broken, counts = nats >= VISIBLE;
  if (counts) {
    game.counted += 1;
    game.score += isRight;
    if (!isRight) game.missed.push(bug.title);
  }
  const verdict = isRight || (choice === "none" && !counts) ? "Yes" : `No, ${broken.toUpperCase()} is broken`;
  const note = counts ? "" : " It cannot be seen by reading, so the round does not count.";
  const score = `${game.score} of ${game.counted} found.`;
  const end = game.round < ROUNDS ? "" : ` The game is over: guessing would find half. ${game.missed.length ? `You missed: ${game.missed.join("; ")}.` : "You missed none."} Comparing numbers finds all of them.`;
  $("game-answer").textContent = `${verdict}. The mistake: ${bug.title}. Its probabilities are ${nats.toFixed(4)} nats per token from the right ones (${SCALE}).${note} ${score}${end}`;
  for (const each of ["a", "b"]) $(`name-${each}`).textContent = `${each.toUpperCase()}: ${each === broken ? "broken" : "right"}`;
  for (const each of CHOICES) $(`choose-${each}`).hidden = true;
  $("game-next").hidden = false;
  $("game-next").textContent = game.round < ROUNDS ? "Next round" : "Play again";
  $("game-next").focus({ preventScroll: true });
}

$("game-next").onclick = () => work(play);
for (const choice of CHOICES) $(`choose-${choice}`).onclick = () => answer(choice);
