// A recipe's own drawing of a state, in a frame with an opaque origin, no network, plain data in. It is a program that
// can still send what it is shown, by WebRTC or as the name of a host: one that lies beside a run waits for a click.

import { useEffect, useReducer, useRef } from "preact/hooks";
import type { SourceDetails, TrajectoryRecord } from "./contract";
import { provider, useAnswer } from "./data";

interface DrawingProps {
  source: string;
  trajectory: TrajectoryRecord;
  message: number | null; // place of the message whose state is drawn; null: the last
}

const allowed = new Set<string>(); // sources whose drawing the viewer has allowed, until the page is loaded again

export function Drawing({ source, trajectory, message }: DrawingProps) {
  const kind = useAnswer<SourceDetails>(`/api/source/${encodeURIComponent(source)}`).value?.drawing;
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  if (!kind) return null;
  if (kind === "given" || allowed.has(source)) return <Frame source={source} trajectory={trajectory} message={message} />;
  const allow = () => {
    allowed.add(source);
    redraw(undefined);
  };
  return (
    <section class="drawing">
      <h2>Drawing</h2>
      <p>This run brings a program that draws its states, view.js. It can send the conversations that it is shown to others. Run it only if you trust whoever wrote it.</p>
      <button type="button" onClick={allow}>Run view.js</button>
    </section>
  );
}

function Frame({ source, trajectory, message }: DrawingProps) {
  const frame = useRef<HTMLIFrameElement>(null);
  const url = `/api/source/${encodeURIComponent(source)}/drawing`;
  const inFile = useAnswer<string>(provider.isFile ? url : null).value;
  const index = message ?? trajectory.messages.length - 1;
  const draw = () => frame.current?.contentWindow?.postMessage({ trajectory, message_index: index }, "*");
  useEffect(draw, [trajectory, index]);
  if (provider.isFile && inFile === undefined) return null;
  return (
    <section class="drawing">
      <h2>State at message {index}</h2>
      <iframe ref={frame} sandbox="allow-scripts" title="The recipe's drawing of the state" onLoad={draw} {...(inFile ? { srcdoc: inFile } : { src: url })} />
    </section>
  );
}
