// What is far from the screen is not drawn yet.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export function Lazy({ height, children }: { height: number; children: ComponentChildren }) {
  const place = useRef<HTMLDivElement>(null);
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    if (place.current === null) return;
    const seen = new IntersectionObserver(([entry]) => entry?.isIntersecting && setNear(true), { rootMargin: "300px" });
    seen.observe(place.current);
    return () => seen.disconnect();
  }, []);
  return (
    <div ref={place} style={{ minHeight: `${height}px` }}>
      {isNear && children}
    </div>
  );
}
