// What the reader chose, kept by the browser where it lets us. A page from a file may have no storage.

import { useState } from "preact/hooks";

const PREFIX = "art view: ";

export function remembered<T>(name: string, otherwise: T): T {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? otherwise : (JSON.parse(text) as T);
  } catch {
    return otherwise;
  }
}

export function remember(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // no storage: the choice lasts as long as the page
  }
}

/** A state that outlives the page. */
export function useChoice<T>(name: string, otherwise: T): [T, (value: T) => void] {
  const [value, setValue] = useState(() => remembered(name, otherwise));
  const choose = (chosen: T) => {
    remember(name, chosen);
    setValue(() => chosen);
  };
  return [value, choose];
}
