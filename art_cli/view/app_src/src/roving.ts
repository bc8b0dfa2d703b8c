// The item of a long list that the keys are at. It takes the focus as soon as it is in the document.

import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { ListHandle } from "./virtual";

export interface Roving {
  here: number; // -1: at none yet
  move: (by: number) => void;
  go: (index: number) => void;
  enter: (index: number) => void; // the item got the focus in another way
}

const TRIES = 10; // frames that an item may take to be drawn

/** `find` gives the element of an item that takes the focus. */
export function useRoving(count: number, list: RefObject<ListHandle | null>, find: (index: number) => HTMLElement | null): Roving {
  const [here, setHere] = useState(-1);
  const wanted = useRef(-1);
  const frame = useRef(0);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);
  const focus = (tries: number) => { // at once if it is drawn: the next key may come before the next frame
    const element = find(wanted.current);
    if (element !== null) element.focus();
    else if (tries > 0) frame.current = requestAnimationFrame(() => focus(tries - 1));
  };
  const go = (index: number) => {
    if (count === 0) return;
    wanted.current = Math.min(count - 1, Math.max(0, index));
    setHere(wanted.current);
    list.current?.scrollTo(wanted.current);
    cancelAnimationFrame(frame.current);
    focus(TRIES);
  };
  return {
    here,
    go,
    move: (by) => go(wanted.current < 0 ? (by > 0 ? 0 : count - 1) : wanted.current + by),
    enter: (index) => {
      wanted.current = index;
      setHere(index);
    },
  };
}
