// Keys of the page: each view registers its own, the newest first, and the help lists what is registered.

import { useLayoutEffect, useRef } from "preact/hooks";

export interface Key {
  keys: string[]; // as KeyboardEvent.key has them; "Shift+ArrowUp" with the modifier before it
  says: string;
  run: (event: KeyboardEvent) => void | boolean; // false: not handled, the next one may
}

const registered: Key[][] = [];

export function useKeys(keys: Key[]): void {
  const current = useRef(keys);
  current.current = keys;
  useLayoutEffect(() => { // with the view, not a frame later: a key pressed in between would be lost
    const set: Key[] = keys.map((_, place) => ({
      get keys() {
        return current.current[place]?.keys ?? [];
      },
      get says() {
        return current.current[place]?.says ?? "";
      },
      run: (event) => current.current[place]?.run(event),
    }));
    registered.unshift(set);
    return () => void registered.splice(registered.indexOf(set), 1);
  }, [keys.length]);
}

export function allKeys(): Key[] {
  return registered.flat();
}

function nameOf(event: KeyboardEvent): string {
  return event.shiftKey && event.key.length > 1 ? `Shift+${event.key}` : event.key;
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest("input:not([type=checkbox]), textarea, select") !== null;
}

export function listenToKeys(): void {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") (event.target as HTMLElement).blur();
      return;
    }
    if (document.querySelector("dialog[open]") !== null) return;
    const name = nameOf(event);
    for (const key of allKeys()) {
      if (key.keys.includes(name) && key.run(event) !== false) {
        event.preventDefault();
        return;
      }
    }
  });
}
