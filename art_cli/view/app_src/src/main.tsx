// The page of `art view`: what a run's files hold, for people.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import { render } from "preact";
import { App } from "./shell";
import { listenToKeys } from "./keys";

const root = document.getElementById("app");
if (root !== null) {
  root.replaceChildren();
  listenToKeys();
  render(<App />, root);
}
