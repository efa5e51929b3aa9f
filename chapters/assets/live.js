/* Python for live cells: gets a cell's code, tells what it prints, shows or raises. */

import { loadPyodide } from "./pyodide/pyodide.mjs";

const RUNNER = `
import linecache
import traceback
from pyodide.code import eval_code


def run(source, say):
    linecache.cache["cell"] = len(source), None, source.splitlines(True), "cell"
    try:
        value = eval_code(source, {"__name__": "__main__"}, filename="cell")
        if hasattr(value, "_repr_html_"):
            say("html", value._repr_html_())
        elif value is not None:
            say("text", repr(value))
    except BaseException as error:
        told = traceback.TracebackException.from_exception(error)
        while told.stack and told.stack[0].filename != "cell":
            del told.stack[0]
        say("error", "".join(told.format()).rstrip())

run
`;

const say = (kind, text = "") => postMessage({ kind, text });

async function prepare() {
  const print = { batched: (text) => say("text", text) };
  const python = await loadPyodide();
  python.setStdout(print);
  python.setStderr(print);
  const archive = await fetch(new URL("minivllm.zip", import.meta.url));
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  return python.runPython(RUNNER);
}

const prepared = prepare();
prepared.catch((error) => setTimeout(() => { throw error; })); // the page's onerror

onmessage = async ({ data }) => {
  const run = await prepared;
  say("begin");
  run(data, say);
  say("end");
};
