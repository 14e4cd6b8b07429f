"use strict";
// Runs the status page's script with the least of a browser, and writes what it has drawn: `node browser.js SCRIPT ANSWER`.
// ANSWER is JSON: {"status": 200, "body": ...}, or {"error": "..."}. Any property but the known ones is an error.
const fs = require("fs");
const vm = require("vm");

const KNOWN = new Set(["textContent", "className", "title"]);
class Node {}
class Text extends Node { constructor(text) { super(); this.text = String(text); } }
class Element extends Node {
  constructor(tag) {
    super();
    const plain = { tag, style: {}, children: [], set: {} };
    return new Proxy(this, {
      get: (_, name) => name === "append" ? (...more) => { plain.children.push(...more.map(node)); }
        : name === "replaceChildren" ? (...more) => { plain.children = more.map(node); }
        : plain[name],
      set: (_, name, value) => {
        if (!KNOWN.has(name)) throw new Error(`the script sets ${String(name)}`);
        if (name === "textContent") plain.children = value === "" ? [] : [new Text(value)];
        else plain.set[name] = String(value);
        return true;
      },
    });
  }
}
const node = (one) => one instanceof Node ? one : new Text(one);
const told = (one) => one instanceof Text ? one.text : { tag: one.tag, ...one.set, style: one.style, children: one.children.map(told) };

const answer = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
const byId = {};
const seen = { asked: [], waits: [] };
const world = {
  Node, AbortSignal, Date,
  document: {
    hidden: answer.hidden === true,
    createElement: (tag) => new Element(tag),
    getElementById: (id) => byId[id] ||= new Element("#" + id),
  },
  fetch: async (url) => {
    seen.asked.push(url);
    if (answer.error) throw new Error(answer.error);
    return { ok: answer.status === 200, status: answer.status, json: async () => answer.body };
  },
  setTimeout: (_, ms) => { seen.waits.push(ms); },
};
vm.runInNewContext(fs.readFileSync(process.argv[2], "utf8"), world);
setImmediate(() => {
  const parts = Object.fromEntries(Object.entries(byId).map(([id, one]) => [id, one.children.map(told)]));
  console.log(JSON.stringify({ ...seen, parts }));
});
