// Answers SQL queries about a trace with Perfetto's trace_processor, as WebAssembly in node:
//
//     node trace_processor.mjs FOLDER TRACE SQL...
//
// It prints a line of JSON for each query: a list of rows. FOLDER is that of
// packaging/trace_processor.py. The engine is built for a worker of a browser, so this makes the
// parts of a worker that it uses.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const file = (name) => path.resolve(folder, name);
const { EngineBase } = await import(file("engine.mjs"));

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "http://localhost/" };
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = new Uint8Array(fs.readFileSync(file("trace_processor.wasm"))).buffer;
  }
};
console.log = console.warn = () => {};
vm.runInThisContext(fs.readFileSync(file("engine_bundle.node.js"), "utf8"));

class Engine extends EngineBase {
  id = "node";
  mode = "WASM";
  rpcSendRequestBytes(data) {
    setImmediate(() => port.onmessage({ data }));
  }
}
const engine = new Engine();
const port = { postMessage: (data) => engine.onRpcResponseBytes(data) };
self.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve, 50)); // the engine starts

const source = fs.openSync(trace);
const buffer = Buffer.alloc(4 << 20);
for (let n; (n = fs.readSync(source, buffer)) > 0; ) {
  await engine.parse(new Uint8Array(buffer.subarray(0, n)));
}
await engine.notifyEof();
for (const sql of queries) {
  const result = await engine.query(sql);
  const columns = result.columns();
  const rows = [];
  for (const at = result.iter({}); at.valid(); at.next()) {
    const cells = columns.map((column) => at.get(column));
    rows.push(cells.map((cell) => (typeof cell === "bigint" ? Number(cell) : cell)));
  }
  process.stdout.write(JSON.stringify(rows) + "\n");
}
process.exit(0);
