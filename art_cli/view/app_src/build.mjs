// Builds ../app/ from src/: app.js, app.css and index.html. `node build.mjs OUT` writes elsewhere, which the test does.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "app");
const { dependencies } = JSON.parse(readFileSync(join(here, "package.json"), "utf8"));

/** The licences of the bundled libraries, as a comment at the head of the output. */
function licences() {
  const texts = Object.entries(dependencies).map(([name, version]) => {
    const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim().replaceAll("*/", "* /");
    return `${name} ${version}\n\n${text}`;
  });
  return `/*! The page of art view, with these libraries:\n\n${texts.join("\n\n")}\n*/`;
}

mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: join(here, "src", "main.tsx") },
  outdir: out,
  bundle: true,
  format: "iife",
  target: ["es2022"],
  minify: true,
  legalComments: "none", // the banner has the licences whole
  banner: { js: licences(), css: "/*! uPlot is under the MIT licence, whole in app.js. */" },
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "ascii", // the file reads the same whatever encoding a host declares
  logLevel: "warning",
});
copyFileSync(join(here, "src", "index.html"), join(out, "index.html"));
