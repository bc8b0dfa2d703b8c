// What stands around every view: header, places to go, help, what is told to a screen reader.

import { useEffect, useRef, useState } from "preact/hooks";
import { Component, type ComponentChildren } from "preact";
import type { Source, Sources, StepSummary } from "./contract";
import { provider, useFollowing } from "./data";
import { ConfigView } from "./config";
import { CurvesView } from "./curves";
import { GroupView } from "./group";
import { StepView } from "./step";
import { JudgeView } from "./judge";
import { PlanView } from "./plan";
import { LabelView } from "./label";
import { ScenarioView } from "./scenario";
import { TrajectoryView } from "./trajectory";
import { allKeys, useKeys } from "./keys";
import { count } from "./numbers";
import { go, link, usePlace, type Place } from "./route";
import { Label } from "./text";
import { useTheme, type Theme } from "./theme";

export function App() {
  const place = usePlace();
  const [theme, turnTheme] = useTheme();
  const [said, say] = useState("");
  const { sources, isLost } = useFollowing(() => say("The run has gone on; the page shows it."));
  const [isHelpOpen, setHelpOpen] = useState(false);
  useKeys([
    { keys: ["?"], says: "this help", run: () => setHelpOpen(true) },
    { keys: ["c"], says: "curves", run: () => go(link.curves()) },
    { keys: ["g"], says: "groups of the newest step", run: () => goToGroups(sources.value) },
    { keys: ["d"], says: "light, dark, or as the system has it", run: turnTheme },
    { keys: ["/"], says: "search", run: focusSearch },
  ]);
  const known = sources.value;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => [event.preventDefault(), document.getElementById("main")?.focus()]}>
        Skip to the content
      </a>
      <Header place={place} sources={known} isLost={isLost} theme={theme} onTheme={turnTheme} onHelp={() => setHelpOpen(true)} />
      <main id="main" tabIndex={-1}>
        <Caught place={place}>
          {known !== undefined ? <View place={place} sources={known} /> : <Waiting error={sources.error} />}
        </Caught>
      </main>
      <div role="status" aria-live="polite" class="unseen">
        {said}
      </div>
      {isHelpOpen && <Help onClose={() => setHelpOpen(false)} />}
    </>
  );
}

/** A view that fails says so, and leaves the header to go elsewhere. */
class Caught extends Component<{ place: Place; children: ComponentChildren }, { error: string | null }> {
  override state = { error: null };

  static override getDerivedStateFromError(error: unknown) {
    return { error: String(error) };
  }

  override componentDidCatch(error: unknown) {
    console.error(error);
  }

  override componentDidUpdate(before: { place: Place }) {
    if (before.place !== this.props.place && this.state.error !== null) this.setState({ error: null });
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return (
      <Notice title="This view failed">
        <Label text={this.state.error} max={500} />
      </Notice>
    );
  }
}

function View({ place, sources }: { place: Place; sources: Sources }) {
  const { route } = place;
  switch (route.page) {
    case "curves":
      return <CurvesView sources={sources} />;
    case "config":
      return <ConfigView sources={sources} />;
    case "judge":
      return <JudgeView sources={sources} />;
    case "plan":
      return <PlanView sources={sources} />;
    case "step":
      return <StepView key={`${route.source}`} sources={sources} route={route} query={place.query} />;
    case "group":
      return <GroupView key={route.group} sources={sources} route={route} />;
    case "label":
      return <LabelView key={`${route.source}/${route.step}/${route.split}`} route={route} />;
    case "trajectory":
      return <TrajectoryView key={route.id} sources={sources} route={route} query={place.query} />;
    case "scenario":
      return <ScenarioView key={route.id} sources={sources} route={route} query={place.query} />;
    case "start":
      return <Start sources={sources} />;
    default:
      return <Notice title="There is no such place in this page">The link may have been cut. Start from the curves or the groups above.</Notice>;
  }
}

/** Where the page opens: at the curves of runs, at the groups of a file. */
function Start({ sources }: { sources: Sources }) {
  useEffect(() => {
    const hasRun = sources.sources.some((source) => source.kind === "run");
    const groups = newestStep(sources);
    const hash = hasRun || groups === null ? link.curves() : groups;
    location.replace(hash);
  }, []);
  return null;
}

export function newestStep(sources: Sources | undefined): string | null {
  const source = sources?.sources.find((each) => each.steps.length > 0);
  if (source === undefined) return null;
  const last = lastStep(source);
  return last === null ? null : link.step(source.id, last.step, last.split);
}

/** The newest step that was trained on, else the newest evaluation. */
export function lastStep(source: Source): StepSummary | null {
  return source.steps.findLast((each) => each.split === "train") ?? source.steps.at(-1) ?? null;
}

function goToGroups(sources: Sources | undefined): void {
  const hash = newestStep(sources);
  if (hash !== null) go(hash);
}

function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>("input[type=search]");
  field?.focus();
  field?.select();
}

// --- header -------------------------------------------------------------------------------------------------------------

interface HeaderProps {
  place: Place;
  sources: Sources | undefined;
  isLost: boolean;
  theme: Theme;
  onTheme: () => void;
  onHelp: () => void;
}

const THEMES: Record<Theme, string> = { auto: "Auto", light: "Light", dark: "Dark" };

function Header({ place, sources, isLost, theme, onTheme, onHelp }: HeaderProps) {
  const { page } = place.route;
  const groups = newestStep(sources) ?? link.curves();
  const isGroups = page === "step" || page === "group" || page === "trajectory" || page === "scenario" || page === "label";
  return (
    <header class="top">
      <a class="mark" href="#/" aria-label="art view: start">
        art<span aria-hidden="true"> view</span>
      </a>
      <nav aria-label="Views">
        <Tab href={link.curves()} isHere={page === "curves"}>
          Curves
        </Tab>
        <Tab href={groups} isHere={isGroups}>
          Groups
        </Tab>
        <Tab href={link.judge()} isHere={page === "judge"}>
          Judge
        </Tab>
        {sources?.sources.some((source) => source.has_plan) && (
          <Tab href={link.plan()} isHere={page === "plan"}>
            Plan
          </Tab>
        )}
        <Tab href={link.config()} isHere={page === "config"}>
          Config
        </Tab>
      </nav>
      <State sources={sources} isLost={isLost} />
      <button type="button" class="quiet" onClick={onTheme} aria-label={`Colours: ${THEMES[theme]}. Change`} title="Light, dark, or as the system has it (d)">
        {THEMES[theme]}
      </button>
      <button type="button" class="quiet" onClick={onHelp} aria-label="Help: the keys of this page" title="Keys of this page (?)">
        ?
      </button>
    </header>
  );
}

function Tab({ href, isHere, children }: { href: string; isHere: boolean; children: ComponentChildren }) {
  return (
    <a href={href} aria-current={isHere ? "page" : undefined}>
      {children}
    </a>
  );
}

/** Whether the page follows a run, how far its index is, or that the server is gone. */
function State({ sources, isLost }: { sources: Sources | undefined; isLost: boolean }) {
  if (isLost) return <span class="state is-lost">the server does not answer</span>;
  const indexing = sources?.sources.filter((source) => source.indexing !== null) ?? [];
  if (indexing.length > 0) {
    const done = indexing.reduce((sum, source) => sum + (source.indexing?.done_bytes ?? 0), 0);
    const all = indexing.reduce((sum, source) => sum + (source.indexing?.bytes ?? 0), 0);
    return (
      <span class="state">
        <progress value={done} max={Math.max(1, all)} aria-label="reading the files" /> reading {Math.floor((100 * done) / Math.max(1, all))} %
      </span>
    );
  }
  const running = sources?.sources.filter((source) => source.is_running && source.kind === "run") ?? [];
  if (running.length > 0) {
    const newest = Math.max(0, ...running.flatMap((source) => source.steps.map((each) => each.step)));
    return <span class="state is-running">training, step {newest}</span>;
  }
  const left = sources?.left_out ?? 0;
  return <span class="state">{provider.isFile && left > 0 ? `${count(left, "trajectory", "trajectories")} left out` : ""}</span>;
}

// --- help, notices ------------------------------------------------------------------------------------------------------

const SHOWN: Record<string, string> = { ArrowLeft: "\u2190", ArrowRight: "\u2192", ArrowUp: "\u2191", ArrowDown: "\u2193", Escape: "Esc" };

function Help({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [keys] = useState(allKeys);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} class="help" aria-labelledby="help-title" onClose={onClose} onClick={(event) => event.target === dialog.current && dialog.current?.close()}>
      <h2 id="help-title">Keys</h2>
      <dl>
        {keys.map((key, place) => (
          <div key={place}>
            <dt>
              {key.keys.map((name) => (
                <kbd key={name}>{name.split("+").map((part) => SHOWN[part] ?? part).join(" ")}</kbd>
              ))}
            </dt>
            <dd>{key.says}</dd>
          </div>
        ))}
      </dl>
      <p class="soft">The address of the page is a link to what it shows; the back button returns.</p>
      <form method="dialog">
        <button>Close</button>
      </form>
    </dialog>
  );
}

export function Waiting({ error, what = "the page" }: { error: string | null; what?: string }) {
  if (error !== null) return <Notice title="This cannot be shown">{<Label text={error} max={1000} />}</Notice>;
  return (
    <p class="waiting" role="status">
      Reading {what} {"\u2026"}
    </p>
  );
}

export function Notice({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div class="notice">
      <h1>{title}</h1>
      <p>{children}</p>
    </div>
  );
}

/** The heading of a view. It names the document, and takes the focus when the view is entered. */
export function Heading({ children, title }: { children: ComponentChildren; title: string }) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    document.title = `${title} \u00b7 art view`;
    if (document.activeElement === document.body || document.activeElement === null) heading.current?.focus({ preventScroll: true });
  }, [title]);
  return (
    <h1 ref={heading} tabIndex={-1}>
      {children}
    </h1>
  );
}
