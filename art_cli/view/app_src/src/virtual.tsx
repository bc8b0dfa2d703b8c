// Long lists that scroll with the window: only what is near the screen is in the document.

import { Virtualizer, observeWindowOffset, observeWindowRect, windowScroll } from "@tanstack/virtual-core";
import type { AriaRole, ComponentChildren, RefObject } from "preact";
import { useImperativeHandle } from "preact/compat";
import { useLayoutEffect, useReducer, useRef, useState } from "preact/hooks";

export interface ListHandle {
  scrollTo: (index: number) => void;
}

interface ListProps {
  count: number;
  estimate: number; // height of an item before it is measured, in px
  item: (index: number) => ComponentChildren;
  itemKey?: (index: number) => string | number;
  itemProps?: (index: number) => Record<string, unknown>;
  handle?: RefObject<ListHandle | null>;
  onRange?: (first: number, last: number) => void;
  class?: string;
  role?: AriaRole;
  itemRole?: AriaRole;
  overscan?: number;
}

const HEADER = 60; // height of what stays at the top of the window, in px

export function VirtualList(props: ListProps) {
  const root = useRef<HTMLDivElement>(null);
  const [margin, setMargin] = useState(0);
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  const options = {
    count: props.count,
    getScrollElement: () => window,
    estimateSize: () => props.estimate,
    observeElementRect: observeWindowRect,
    observeElementOffset: observeWindowOffset,
    scrollToFn: windowScroll,
    initialOffset: () => window.scrollY,
    overscan: props.overscan ?? 6,
    scrollMargin: margin,
    scrollPaddingStart: HEADER,
    ...(props.itemKey && { getItemKey: props.itemKey }),
    onChange: () => redraw(undefined),
  };
  const [virtual] = useState(() => new Virtualizer<Window, HTMLElement>(options));
  virtual.setOptions(options);
  useLayoutEffect(() => virtual._didMount(), []);
  useLayoutEffect(() => {
    virtual._willUpdate();
    const top = (root.current?.getBoundingClientRect().top ?? 0) + window.scrollY;
    if (Math.abs(top - margin) > 1) setMargin(top);
  });
  useImperativeHandle(props.handle ?? { current: null }, () => ({
    scrollTo: (index) => virtual.scrollToIndex(index, { align: "auto" }),
  }));
  const items = virtual.getVirtualItems();
  const first = items[0]?.index ?? 0;
  const last = items.at(-1)?.index ?? 0;
  useLayoutEffect(() => props.onRange?.(first, last), [first, last, props.count]);
  return (
    <div ref={root} role={props.role} class={props.class} style={{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>
      {items.map((item) => (
        <div
          key={item.key as string | number}
          ref={virtual.measureElement as (element: HTMLElement | null) => void}
          data-index={item.index}
          role={props.itemRole}
          class="virtual-item"
          style={{ transform: `translateY(${item.start - margin}px)` }}
          {...props.itemProps?.(item.index)}
        >
          {props.item(item.index)}
        </div>
      ))}
    </div>
  );
}
