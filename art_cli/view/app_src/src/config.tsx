// The resolved configuration of each run, and where runs differ.

import { useState } from "preact/hooks";
import type { SourceDetails, Sources } from "./contract";
import { useAnswers } from "./data";
import { count } from "./numbers";
import { Heading, Waiting } from "./shell";
import { Label } from "./text";

export function ConfigView({ sources }: { sources: Sources }) {
  const answers = useAnswers<SourceDetails>(sources.sources.map((source) => `/api/source/${encodeURIComponent(source.id)}`));
  const [isOnlyDifferent, setOnlyDifferent] = useState(true);
  const [find, setFind] = useState("");
  const runs = sources.sources.flatMap((source, place) => {
    const config = answers[place]?.value?.config;
    return config ? [{ source, values: flattened(config) }] : [];
  });
  const hasSeveral = runs.length > 1;
  const keys = [...new Set(runs.flatMap((run) => [...run.values.keys()]))];
  const different = new Set(keys.filter((key) => new Set(runs.map((run) => run.values.get(key))).size > 1));
  const shown = keys
    .filter((key) => !hasSeveral || !isOnlyDifferent || different.has(key))
    .filter((key) => `${key} ${runs.map((run) => run.values.get(key)).join(" ")}`.toLowerCase().includes(find.toLowerCase()));
  if (answers.every((answer) => answer.value === undefined)) return <Waiting error={answers[0]?.error ?? null} what="the configuration" />;
  return (
    <div class="page">
      <div class="head">
        <Heading title="Config">Config</Heading>
        <div class="section-head">
          <label class="search">
            <span class="unseen">Search keys and values</span>
            <input type="search" placeholder="Search keys and values  /" value={find} onInput={(event) => setFind(event.currentTarget.value)} />
          </label>
          {hasSeveral && (
            <label class="check">
              <input type="checkbox" checked={isOnlyDifferent} onChange={(event) => setOnlyDifferent(event.currentTarget.checked)} />
              only where runs differ
            </label>
          )}
          <span class="soft num" role="status">
            {count(shown.length, "key")}
          </span>
        </div>
      </div>
      {keys.length === 0 ? (
        <p class="waiting">There is no configuration here: a file of trajectories has none.</p>
      ) : (
        <div class="scroll-x" role="region" aria-label="Configuration" tabIndex={0}>
          <table class="config">
            <thead>
              <tr>
                <th scope="col">key</th>
                {runs.map(({ source }) => (
                  <th key={source.id} scope="col">
                    <Label text={source.name} max={60} />
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {shown.map((key) => (
                <tr key={key} data-different={different.has(key) || undefined}>
                  <th scope="row">
                    <KeyName name={key} />
                  </th>
                  {runs.map(({ source, values }) => (
                    <td key={source.id}>{value(values.get(key))}</td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}

function KeyName({ name }: { name: string }) {
  const at = name.lastIndexOf(".") + 1;
  return (
    <>
      <span class="faint">
        <Label text={name.slice(0, at)} />
      </span>
      <Label text={name.slice(at)} />
    </>
  );
}

function value(text: string | undefined) {
  if (text === undefined) return <span class="faint">{"\u2013"}</span>;
  if (text === "null") return <span class="faint">null</span>;
  return <Label text={text} max={400} />;
}

/** Dotted keys and their values as JSON, strings bare. */
function flattened(config: unknown, prefix = "", into = new Map<string, string>()): Map<string, string> {
  if (config !== null && typeof config === "object" && !Array.isArray(config) && Object.keys(config).length > 0) {
    for (const [key, inner] of Object.entries(config)) flattened(inner, prefix === "" ? key : `${prefix}.${key}`, into);
  } else if (prefix !== "") {
    into.set(prefix, typeof config === "string" ? config : JSON.stringify(config));
  }
  return into;
}
