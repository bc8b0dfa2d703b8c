// The place in the page, as the location's hash: what a link holds, and what the back button returns to.

import { useEffect, useState } from "preact/hooks";

export type Route =
  | { page: "curves" | "config" | "judge" | "plan" | "start" }
  | { page: "step"; source: string; step: number; split: string }
  | { page: "label"; source: string; step: number; split: string }
  | { page: "group"; source: string; step: number; split: string; group: string }
  | { page: "trajectory"; source: string; id: string }
  | { page: "scenario"; source: string; id: string }
  | { page: "unknown" };

export interface Place {
  route: Route;
  query: URLSearchParams;
}

const encode = encodeURIComponent;

export const link = {
  curves: () => "#/curves",
  config: () => "#/config",
  judge: () => "#/judge",
  plan: () => "#/plan",
  step: (source: string, step: number, split: string, query = "") =>
    `#/s/${encode(source)}/step/${step}/${encode(split)}${query && `?${query}`}`,
  group: (source: string, step: number, split: string, group: string) =>
    `#/s/${encode(source)}/step/${step}/${encode(split)}/group/${encode(group)}`,
  label: (source: string, step: number, split: string) => `#/s/${encode(source)}/step/${step}/${encode(split)}/label`,
  trajectory: (source: string, id: string) => `#/s/${encode(source)}/t/${encode(id)}`,
  scenario: (source: string, id: string, query = "") =>
    `#/s/${encode(source)}/scenario/${encode(id)}${query && `?${query}`}`,
};

export function parsePlace(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  return { route: parseRoute(path), query: new URLSearchParams(query) };
}

function parseRoute(path: string): Route {
  const parts = path.split("/").filter(Boolean).map(decoded);
  const [first, source = "", kind, a = "", b, c, d] = parts;
  if (first === undefined) return { page: "start" };
  if (first === "curves" || first === "config" || first === "judge" || first === "plan") return { page: first };
  if (first !== "s") return { page: "unknown" };
  if (kind === "t") return { page: "trajectory", source, id: a };
  if (kind === "scenario") return { page: "scenario", source, id: a };
  if (kind === "step" && b !== undefined) {
    const place = { source, step: Number(a), split: b };
    if (c === "label") return { page: "label", ...place };
    return c === "group" && d !== undefined ? { page: "group", ...place, group: d } : { page: "step", ...place };
  }
  return { page: "unknown" };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a link that was cut in the middle of an escape
  }
}

// --- history ----------------------------------------------------------------------------------------------------------

const scrolls = new Map<string, number>(); // key of a history entry -> where it was scrolled to
let entry = "";

function remember(): void {
  scrolls.set(entry, window.scrollY);
}

function enter(): void {
  const known = (history.state as { entry?: string } | null)?.entry;
  entry = known ?? `${Date.now()}-${Math.random()}`;
  if (known === undefined) history.replaceState({ entry }, "");
}

/** Goes to a hash: the back button returns from it. */
export function go(hash: string): void {
  if (hash !== location.hash) location.hash = hash;
}

/** Changes the query of this place without an entry of its own in the history. */
export function setQuery(changes: Record<string, string | null>): void {
  const { query } = parsePlace(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  const path = location.hash.split("?", 1)[0] ?? "";
  history.replaceState(history.state, "", query.size ? `${path}?${query}` : path || "#/");
  window.dispatchEvent(new Event("place"));
}

export function usePlace(): Place {
  const [place, setPlace] = useState(() => parsePlace(location.hash));
  useEffect(() => {
    history.scrollRestoration = "manual";
    enter();
    const moved = () => {
      enter();
      setPlace(parsePlace(location.hash));
      restoreScroll(scrolls.get(entry) ?? 0);
    };
    const changed = () => setPlace(parsePlace(location.hash));
    window.addEventListener("popstate", moved);
    window.addEventListener("place", changed);
    window.addEventListener("scroll", remember, { passive: true });
    return () => {
      window.removeEventListener("popstate", moved);
      window.removeEventListener("place", changed);
      window.removeEventListener("scroll", remember);
    };
  }, []);
  return place;
}

/** Scrolls there as soon as the page is long enough for it. */
function restoreScroll(top: number, tries = 10): void {
  requestAnimationFrame(() => {
    window.scrollTo(0, top);
    if (tries > 0 && Math.abs(window.scrollY - top) > 2) restoreScroll(top, tries - 1);
  });
}
