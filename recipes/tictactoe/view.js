// Draws the board at a message of an attempt, for `art view`. The page posts {trajectory, message_index} to this frame.
"use strict";

const SIZE = 3;
const CELL = 44; // pixels

addEventListener("message", (event) => {
  if (event.source !== parent) return;
  const { trajectory, message_index: index } = event.data;
  const messages = trajectory.messages.slice(0, index + 1);
  const shown = messages.findLastIndex((message) => message.role === "user");
  if (shown < 0) return document.body.replaceChildren("no board yet");
  // the move that answers this board, also where the board itself was chosen
  const reply = trajectory.messages[shown + 1];
  const move = reply?.role === "assistant" ? String(reply.content).trim() : null;
  document.body.replaceChildren(board(String(messages[shown].content), move), caption(move));
});

/** A board as game.py's `show` writes it: "1 X2 3" is a row whose middle cell has an X. */
function board(text, move) {
  const grid = document.createElement("div");
  grid.style.cssText = `display:grid;grid-template-columns:repeat(${SIZE},${CELL}px);gap:3px;padding:8px;width:max-content`;
  text.split(/\s+/).slice(0, SIZE * SIZE).forEach((cell, place) => {
    const number = String(place + 1);
    const mark = cell[0] === "X" || cell[0] === "O" ? cell[0] : "";
    const isMove = move === number;
    const square = document.createElement("div");
    square.textContent = mark || (isMove ? "X" : number);
    const colour = mark === "O" ? "#c2410c" : mark === "X" || isMove ? "#1d4ed8" : "light-dark(#9ca3af, #6b7280)";
    const edge = isMove ? "2px solid #1d4ed8" : "1px solid light-dark(#d1d5db, #4b5563)";
    square.style.cssText =
      `width:${CELL}px;height:${CELL}px;box-sizing:border-box;display:grid;place-items:center;border:${edge};` +
      `border-radius:4px;color:${colour};font:${mark || isMove ? "600 22px" : "13px"} system-ui,sans-serif`;
    grid.append(square);
  });
  return grid;
}

function caption(move) {
  const line = document.createElement("p");
  line.style.cssText = "margin:0;padding:0 8px 8px";
  line.textContent = move === null ? "before the move" : `X moves: ${move.slice(0, 40)}`;
  return line;
}
