// Draws a game of 2048 board by board, for `art view`. The page posts {trajectory, message_index} to this frame.
// Each move is a conversation of its own, so the boards are those of all branches, in their order.
"use strict";

const CELL = 26; // pixels
const COLOURS = ["#cdc1b4", "#eee4da", "#ede0c8", "#f2b179", "#f59563", "#f67c5f", "#f65e3b", "#edcf72", "#edcc61"];

addEventListener("message", (event) => {
  if (event.source !== parent) return;
  const { trajectory, conversation } = event.data;
  const games = [...trajectory.branches, trajectory.messages];
  // `conversation` counts as the turns do: 0 is `messages`, which stands last here
  const chosen = conversation > 0 ? conversation - 1 : games.length - 1;
  const strip = document.createElement("div");
  strip.style.cssText = "display:flex;gap:10px;overflow-x:auto;padding:8px";
  strip.append(...games.map((messages, place) => move(messages, place, place === chosen)));
  document.body.replaceChildren(strip);
  strip.children[chosen]?.scrollIntoView({ inline: "center" });
});

/** One board with the move that was chosen on it. */
function move(messages, place, isChosen) {
  const text = String(messages.findLast((message) => message.role === "user")?.content ?? "");
  const reply = String(messages.findLast((message) => message.role === "assistant")?.content ?? "");
  const figure = document.createElement("figure");
  figure.style.cssText = `margin:0;padding:4px;border-radius:6px;outline:${isChosen ? "2px solid #1d4ed8" : "none"}`;
  const caption = document.createElement("figcaption");
  caption.textContent = `${place + 1}. ${reply.slice(0, 20)}`;
  caption.style.cssText = "white-space:nowrap;padding-top:4px";
  figure.append(board(text), caption);
  return figure;
}

/** Rows of digits; a digit is the power of two on the tile, 0 a free cell. */
function board(text) {
  const rows = text.trim().split("\n").slice(0, 8);
  const grid = document.createElement("div");
  grid.style.cssText = `display:grid;grid-template-columns:repeat(${rows[0]?.length ?? 4},${CELL}px);gap:2px`;
  for (const digit of rows.join("").slice(0, 64)) {
    const power = Number.parseInt(digit, 36) || 0;
    const tile = document.createElement("div");
    tile.textContent = power > 0 ? String(2 ** power) : "";
    tile.style.cssText =
      `width:${CELL}px;height:${CELL}px;display:grid;place-items:center;border-radius:3px;color:#3c3a32;` +
      `font:600 11px system-ui,sans-serif;background:${COLOURS[Math.min(power, COLOURS.length - 1)]}`;
    grid.append(tile);
  }
  return grid;
}
