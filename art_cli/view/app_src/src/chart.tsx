// Charts by uPlot: lines over steps with their intervals, stacked areas, and bars that can be clicked.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { number } from "./numbers";
import { colour, onTheme } from "./theme";

export interface Line {
  name: string;
  points: [x: number, y: number | null][];
  band?: [x: number, low: number | null, high: number | null][];
  tone: string; // name of a colour in the style sheet
  dash?: number[];
  hasDots?: boolean;
  isFaint?: boolean;
  isThin?: boolean;
}

interface LinesProps {
  lines: Line[];
  height: number;
  label: string; // what a screen reader says the chart shows
  covers?: number[]; // values that the vertical axis has in any case
  isStacked?: boolean;
  isBare?: boolean; // without axes
  at?: number | null; // a step to mark
  onStep?: (step: number) => void;
  onHover?: (step: number | null) => void;
  format?: (value: number) => string;
}

const SYNC = "steps"; // cursors of all charts over steps move together

export function Lines(props: LinesProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const [theme, setTheme] = useState(0);
  const [width, setWidth] = useState(0);
  const shape = JSON.stringify(props.lines.map((line) => [line.name, line.tone, line.dash, line.hasDots, line.isFaint, !!line.band]));
  const data = useMemo(() => aligned(props.lines, props.isStacked ?? false), [props.lines, props.isStacked]);
  useEffect(() => onTheme(() => setTheme((count) => count + 1)), []);
  useEffect(() => {
    const element = box.current;
    if (element === null) return;
    const sizes = new ResizeObserver(([entry]) => setWidth(Math.floor(entry?.contentRect.width ?? 0)));
    sizes.observe(element);
    return () => sizes.disconnect();
  }, []);
  useEffect(() => {
    if (box.current === null || width < 40) return;
    const made = new uPlot(options(latest, width), data, box.current);
    plot.current = made;
    return () => {
      made.destroy();
      plot.current = null;
    };
  }, [shape, theme, width > 0 && width < 40 ? 0 : width, props.height, props.isStacked]);
  useEffect(() => plot.current?.setData(data), [data]);
  useEffect(() => plot.current?.redraw(false), [props.at]);
  return <div ref={box} class="chart" role="img" aria-label={`${props.label}. ${spoken(props.lines)}`} style={{ height: `${props.height}px` }} />;
}

/** What a chart shows, in words: from where to where each line goes. */
function spoken(lines: Line[]): string {
  return lines
    .slice(0, 6)
    .map((line) => {
      const known = line.points.filter(([, y]) => y !== null);
      const [first, last] = [known[0], known.at(-1)];
      if (first === undefined || last === undefined) return `${line.name}: no values`;
      if (first === last) return `${line.name}: ${number(last[1])} at step ${last[0]}`;
      return `${line.name}: ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
    })
    .join("; ");
}

/** uPlot's columns: x, then for each line its values and, where it has a band, low and high. */
function aligned(lines: Line[], isStacked: boolean): uPlot.AlignedData {
  const tables: uPlot.AlignedData[] = [];
  for (const line of lines) {
    tables.push(columns(line.points));
    if (line.band) {
      tables.push(columns(line.band.map(([x, low]) => [x, low])));
      tables.push(columns(line.band.map(([x, , high]) => [x, high])));
    }
  }
  if (tables.length === 0) return [[]];
  const joined = uPlot.join(tables) as (number | null | undefined)[][];
  if (!isStacked) return joined as uPlot.AlignedData;
  for (let row = 2; row < joined.length; row++) {
    joined[row] = (joined[row] ?? []).map((value, place) => (joined[row - 1]?.[place] ?? 0) + (value ?? 0));
  }
  return joined as uPlot.AlignedData;
}

function columns(points: [number, number | null][]): uPlot.AlignedData {
  const unique = new Map(points); // the last value of a step counts
  const steps = [...unique.keys()].sort((a, b) => a - b);
  return [steps, steps.map((step) => unique.get(step) ?? null)];
}

type Latest = { current: LinesProps };

function options(latest: Latest, width: number): uPlot.Options {
  const { lines, height, isBare, isStacked, onStep } = latest.current;
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const [place, line] of lines.entries()) {
    const stroke = colour(line.tone);
    const own = series.length;
    series.push({
      label: line.name,
      stroke: line.isFaint ? faded(stroke, 0.35) : stroke,
      width: line.hasDots ? 2 : line.isThin ? 1.2 : 1.5,
      ...(line.dash && { dash: line.dash }),
      spanGaps: true,
      points: { show: line.hasDots ? true : (plot, index) => alone(plot, index), size: 6, fill: stroke },
      ...(isStacked && place === 0 && { fill: faded(stroke, 0.55) }),
    });
    if (isStacked && place > 0) bands.push({ series: [own, own - 1], fill: faded(stroke, 0.55) });
    if (line.band) {
      // A wide interval of a smoothed line may leave the chart; that of measured points does not.
      const hidden: uPlot.Series = { auto: line.hasDots ?? false, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push(hidden, { ...hidden });
      bands.push({ series: [own + 2, own + 1], fill: faded(stroke, 0.13) });
    }
  }
  return {
    width,
    height,
    series,
    bands,
    padding: isBare ? [4, 4, 4, 4] : [10, 12, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: SYNC, setSeries: false },
      drag: { x: false, y: false },
      points: { size: 7 },
      y: false,
    },
    scales: { x: { time: false, range: wide }, y: { range: (_, low, high) => covered(low, high, latest.current.covers ?? []) } },
    axes: axes(isBare ?? false, latest),
    hooks: {
      setCursor: [(plot) => latest.current.onHover?.(stepAt(plot))],
      draw: [(plot) => markStep(plot, latest.current.at ?? null)],
      ready: [(plot) => onStep && clickable(plot, latest)],
    },
  };
}

/** A run of one step is drawn in the middle. */
function wide(_: uPlot, low: number, high: number): [number, number] {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function covered(low: number | null, high: number | null, covers: number[]): [number, number] {
  const known = [low, high, ...covers].filter((value): value is number => value !== null && Number.isFinite(value));
  if (known.length === 0) return [0, 1];
  const [bottom, top] = [Math.min(...known), Math.max(...known)];
  if (bottom === top) return bottom === 0 ? [0, 1] : [bottom - Math.abs(bottom) * 0.1, top + Math.abs(top) * 0.1];
  const room = (top - bottom) * 0.06;
  return [covers.includes(bottom) ? bottom : bottom - room, covers.includes(top) ? top : top + room];
}

/** Whether the value at `index` has no neighbour to draw a line to. */
function alone(plot: uPlot, index: number): boolean {
  return (plot.data[index] ?? []).filter((value) => value !== null && value !== undefined).length === 1;
}

function axes(isBare: boolean, latest: Latest): uPlot.Axis[] {
  if (isBare) return [{ show: false }, { show: false }];
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const common = {
    stroke: colour("--faint"),
    font,
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
  };
  const format = latest.current.format ?? tick;
  return [
    { ...common, space: 60, size: 24, gap: 4, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000] },
    { ...common, space: 34, gap: 6, size: (_plot, values) => 14 + 6.2 * Math.max(2, ...(values ?? []).map((value) => value.length)), values: (_plot, splits) => splits.map(format) },
  ];
}

function tick(value: number): string {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(0).replace("e+", "e");
  return size >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toPrecision(3));
}

function stepAt(plot: uPlot): number | null {
  const index = plot.cursor.idx;
  return index === null || index === undefined ? null : (plot.data[0]?.[index] ?? null);
}

function markStep(plot: uPlot, step: number | null): void {
  if (step === null) return;
  const x = Math.round(plot.valToPos(step, "x", true));
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("--faint");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function clickable(plot: uPlot, latest: Latest): void {
  plot.over.style.cursor = "pointer";
  plot.over.addEventListener("click", () => {
    const step = stepAt(plot);
    if (step !== null) latest.current.onStep?.(step);
  });
}

function faded(rgb: string, alpha: number): string {
  const parts = rgb.match(/[\d.]+/g)?.slice(0, 3) ?? ["0", "0", "0"];
  return `rgba(${parts.join(", ")}, ${alpha})`;
}

// --- bars ---------------------------------------------------------------------------------------------------------------

export interface Bar {
  low: number;
  high: number;
  count: number;
}

/** The value under each bar, as many as there is room for. */
function sparse(bars: Bar[], width: number): string[] {
  const every = Math.ceil((bars.length * 34) / Math.max(width, 34));
  return bars.map((bar, place) => (place % every === 0 ? tick(bar.low) : ""));
}

interface BarsProps {
  bars: Bar[];
  height: number;
  label: string;
  noun: string;
  chosen: { low: number; high: number } | null;
  onChoose: (bar: Bar | null) => void;
}

function range({ low, high }: Bar): string {
  return low === high ? number(low) : `from ${number(low)} to ${number(high)}`;
}

/** A histogram. Over each bar lies a button, so that keyboard and screen reader have it too. */
export function Bars({ bars, height, label, noun, chosen, onChoose }: BarsProps) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [theme, setTheme] = useState(0);
  const [places, setPlaces] = useState<{ left: number; width: number; top: number }[]>([]);
  const isChosen = (bar: Bar) => chosen !== null && chosen.low === bar.low && chosen.high === bar.high;
  const key = JSON.stringify([bars, chosen]);
  useEffect(() => onTheme(() => setTheme((count) => count + 1)), []);
  useEffect(() => {
    if (box.current === null) return;
    const sizes = new ResizeObserver(([entry]) => setWidth(Math.floor(entry?.contentRect.width ?? 0)));
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  useEffect(() => {
    const [first, last] = [bars[0], bars.at(-1)];
    if (box.current === null || width < 40 || first === undefined || last === undefined) return;
    const isExact = bars.every((each) => each.low === each.high); // a bar for each value: they stand side by side
    const edges = (each: Bar, place: number): [number, number] => (isExact ? [place, place + 1] : [each.low, each.high]);
    const middles = bars.map((each, place) => edges(each, place).reduce((sum, edge) => sum + edge) / 2);
    const on = bars.map((bar) => (chosen === null || isChosen(bar) ? bar.count : null));
    const off = bars.map((bar) => (chosen === null || isChosen(bar) ? null : bar.count));
    const paths = uPlot.paths.bars?.({ size: [0.92, 60], radius: 0.08 });
    const bar = (tone: string): uPlot.Series => ({ fill: colour(tone), stroke: "transparent", width: 0, points: { show: false }, ...(paths && { paths }) });
    const most = Math.max(1, ...bars.map((each) => each.count));
    const [left, right] = isExact ? [0, bars.length] : [first.low, last.high];
    const place = (plot: uPlot) => {
      const { offsetLeft, offsetTop } = plot.over;
      const x = (value: number) => offsetLeft + plot.valToPos(value, "x");
      setPlaces(
        bars.map((each, index) => {
          const [start, end] = edges(each, index).map(x) as [number, number];
          return { left: start, width: end - start, top: offsetTop + plot.valToPos(each.count, "y") };
        }),
      );
    };
    const made = new uPlot(
      {
        width,
        height,
        hooks: { ready: [place] },
        padding: [18, 4, 0, 4],
        legend: { show: false },
        cursor: { show: false },
        series: [{}, bar("--series-1"), bar("--bar-off")],
        scales: { x: { time: false, range: [left, right] }, y: { range: [0, most] } },
        axes: [
          { stroke: colour("--faint"), font: `11px ${getComputedStyle(document.body).fontFamily}`, grid: { show: false }, ticks: { show: false }, size: 22, gap: 3, space: 40, ...(isExact ? { splits: () => middles, values: () => sparse(bars, width) } : { values: (_plot: uPlot, splits: number[]) => splits.map(tick) }) },
          { show: false },
        ],
      },
      [middles, on, off],
      box.current,
    );
    return () => made.destroy();
  }, [key, width, height, theme]);
  return (
    <div class="bars" role="group" aria-label={label} style={{ height: `${height}px` }}>
      <div ref={box} aria-hidden="true" />
      {places.length === bars.length &&
        bars.map((bar, place) => {
          const at = places[place];
          return (
            bar.count > 0 && (
              <button
                key={place}
                type="button"
                class="bar"
                aria-pressed={isChosen(bar)}
                aria-label={`${noun} ${range(bar)}: ${bar.count}`}
                title={`${range(bar)}: ${bar.count}`}
                style={{ left: `${at?.left}px`, width: `${at?.width}px` }}
                onClick={() => onChoose(isChosen(bar) ? null : bar)}
              >
                <span style={{ top: `${(at?.top ?? 0) - 15}px` }}>{bar.count}</span>
              </button>
            )
          );
        })}
    </div>
  );
}
