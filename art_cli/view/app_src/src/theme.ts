// Light and dark: the reader's system decides, unless the switch says otherwise.

import { useEffect } from "preact/hooks";
import { useChoice } from "./memory";

export type Theme = "auto" | "light" | "dark";

const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

export function useTheme(): [Theme, () => void] {
  const [theme, setTheme] = useChoice<Theme>("theme", "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    window.dispatchEvent(new Event("theme"));
  }, [theme]);
  return [theme, () => setTheme(NEXT[theme])];
}

/** Calls back whenever colours may have changed. */
export function onTheme(changed: () => void): () => void {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", changed);
  window.addEventListener("theme", changed);
  return () => {
    dark.removeEventListener("change", changed);
    window.removeEventListener("theme", changed);
  };
}

/** A colour of the style sheet as a canvas takes it. */
export function colour(name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
