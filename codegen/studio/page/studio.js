// The studio's page: sends the entry to the generator on this machine and shows the answers.
"use strict";

const get = (id) => document.getElementById(id);
const DTYPES = ["float32", "float16", "bfloat16", "int32", "int64", "bool"];
const VIEW = { q_len: 1024, kv_len: 1024, block_m: 64, block_n: 64, q_offset: 0, batch: 0, head: 0 };
const LABELS = { q_len: "queries", kv_len: "keys", block_m: "block, queries", block_n: "block, keys",
  q_offset: "query offset", batch: "batch row", head: "head" };
const START = { name: "mine", mask: "causal and window(size)", score: "softcap(30.0) + slope[h] * (kv_idx - q_idx)",
  scalars: [{ name: "size", type: "int", min: "1", max: "", example: "256" }],
  tensors: [{ name: "slope", dims: "h", dtype: "float32", grad: true, example: "0.5 / (1 + h)" }] };
const ROWS = {
  scalars: [["name", "name"], ["type", ["int", "float"]], ["min", "min"], ["max", "max"], ["example", "example"]],
  tensors: [["name", "name"], ["dims", "dims: b, kv_idx"], ["dtype", DTYPES], ["grad", true], ["example", "example, over the dims"]],
  named: [["kind", ["masks", "scores"]], ["header", "name(parameter)"], ["body", "expression"]],
};

let mode = "form";
let latest = 0;
let timer = 0;
let calls = { torch: "", jax: "" };
let framework = "torch";
let shownFile = "portable.py";
let problems = [];
let scalars = {};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// ------------------------------------------------------------------------------------------------------- the form

function addRow(kind, values = {}) {
  const row = element("div", { class: `row ${kind}` });
  for (const [key, what] of ROWS[kind]) {
    if (Array.isArray(what)) {
      const select = element("select", { "data-row": key, "aria-label": key });
      for (const each of what) select.append(element("option", { value: each }, kind === "named" ? each.slice(0, -1) : each));
      // A wrong value stays visible, with its error.
      if (values[key] && !what.includes(values[key])) select.append(element("option", { value: values[key] }, values[key]));
      select.value = values[key] || what[0];
      row.append(select);
    } else if (what === true) {
      const box = element("input", { type: "checkbox", "data-row": key });
      box.checked = values[key] === true;
      row.append(element("label", {}, box, "grad"));
    } else {
      const input = element("input", { "data-row": key, placeholder: what, "aria-label": key, spellcheck: "false" });
      input.value = values[key] || "";
      row.append(input);
    }
  }
  const remove = element("button", { type: "button", class: "remove", "aria-label": "Remove" }, "×");
  remove.addEventListener("click", () => { row.remove(); edited("form"); });
  row.append(remove);
  get(`rows-${kind}`).append(row);
  return row;
}

function readForm() {
  const form = {};
  for (const field of document.querySelectorAll("[data-key]")) {
    form[field.dataset.key] = field.type === "checkbox" ? field.checked : field.value;
  }
  for (const kind of Object.keys(ROWS)) {
    form[kind] = [...get(`rows-${kind}`).children].map((row) => Object.fromEntries(
      [...row.querySelectorAll("[data-row]")].map((f) => [f.dataset.row, f.type === "checkbox" ? f.checked : f.value])));
  }
  return form;
}

function fillForm(form) {
  get("no-form").hidden = form !== null;
  get("fields").hidden = form === null;
  if (form === null) return;
  for (const field of document.querySelectorAll("[data-key]")) {
    if (field.type === "checkbox") field.checked = form[field.dataset.key] === true;
    else field.value = form[field.dataset.key] || "";
  }
  for (const kind of Object.keys(ROWS)) {
    get(`rows-${kind}`).replaceChildren();
    for (const values of form[kind] || []) addRow(kind, values);
  }
}

function choose(next) {
  mode = next;
  for (const each of ["form", "yaml"]) {
    get(each).hidden = each !== next;
    get(`tab-${each}`).setAttribute("aria-selected", each === next);
  }
  showProblems(problems);
}

// ----------------------------------------------------------------------------------------------------- the requests

async function ask(path, request) {
  const response = await fetch(path, request && {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), { field: answer.field });
  return answer;
}

function edited(where) {
  if (where) choose(where);
  clearTimeout(timer);
  timer = setTimeout(refresh, 250);
}

async function refresh() {
  const number = ++latest;
  const view = {};
  for (const input of get("view").querySelectorAll("[data-view]")) view[input.dataset.view] = Number(input.value);
  const entry = mode === "form" ? { form: readForm() } : { entry: get("f-yaml").value };
  document.body.classList.add("busy");
  try {
    const answer = await ask("api/look", { ...entry, view, scalars });
    if (number === latest) show(answer);
  } catch (error) {
    if (number === latest) showProblems([{ field: error.field || "", line: 0, message: error.message }]);
  } finally {
    if (number === latest) document.body.classList.remove("busy");
  }
}

function show(answer) {
  if (answer.entry !== undefined) {
    if (mode === "form") get("f-yaml").value = answer.entry;
    else fillForm(answer.form);
    keep(answer.entry);
  }
  showProblems(answer.problems);
  if (answer.formulas) showVariant(answer);
  if (answer.picture) showPicture(answer.picture);
  if (answer.picture) get("output").hidden = false;
  // Results that still belong to an older entry are dimmed.
  get("output").classList.toggle("stale", !answer.picture);
  get("formulas").classList.toggle("stale", !answer.formulas);
  if (answer.formulas) loadKernels();
}

function showProblems(found) {
  problems = found;
  for (const old of document.querySelectorAll(".problem")) old.remove();
  for (const old of document.querySelectorAll(".wrong")) old.classList.remove("wrong");
  const list = get("problems");
  list.replaceChildren();
  list.hidden = found.length === 0;
  for (const { field, line, message } of found) {
    const where = mode === "yaml" && line ? `line ${line}: ` : "";
    const item = element("li", {}, element("code", {}, field || "entry"), ` ${where}${message}`);
    const place = mode === "yaml" && !field.startsWith("view") ? get("f-yaml").parentElement : placeOf(field);
    if (place) {
      // In a row, only the field that is wrong is marked.
      const own = place.querySelector(`[data-row="${CSS.escape((field.split(".")[2] || "").replace(/\[.*/, ""))}"]`);
      (own || place).classList.add("wrong");
      if (mode === "form" || field.startsWith("view")) place.append(element("p", { class: "problem" }, message));
      item.addEventListener("click", () => (own || place.querySelector("input, textarea, select"))?.focus());
    }
    list.append(item);
  }
}

// The element of a field's path: a row of scalars or tensors by its name, else that of the longest known prefix.
function placeOf(field) {
  const [first, name] = field.split(".");
  if (first === "scalars" || first === "tensors") {
    for (const row of get(`rows-${first}`).children) {
      if (row.querySelector('[data-row="name"]').value.trim() === name) return row;
    }
  }
  if (first === "masks" || first === "scores") {
    for (const row of get("rows-named").children) {
      if (row.querySelector('[data-row="header"]').value.startsWith(name.split("(")[0])) return row;
    }
  }
  for (let path = field; path; path = path.slice(0, Math.max(path.lastIndexOf("."), 0))) {
    const found = document.querySelector(`[data-field="${CSS.escape(path)}"]`);
    if (found) return found;
  }
  return null;
}

// ------------------------------------------------------------------------------------------------------ the results

function showVariant(answer) {
  // The generator escapes what it puts into MathML and into highlighted source.
  get("formulas").hidden = false;
  get("formulas").replaceChildren(...answer.formulas.map(({ label, math }) => {
    const formula = element("div", { class: "math" });
    formula.innerHTML = math;
    return element("div", { class: "formula" }, element("span", {}, label), formula);
  }));
  get("legend").innerHTML = answer.legend.map(({ symbol, meaning }) => `${symbol}&nbsp;${meaning}`).join(", ");
  calls = { torch: answer.torch, jax: answer.jax };
  showCall();
  get("render").textContent = answer.render;
  const hints = [...answer.hints, ...(answer.others.length ? [`Shown is ${answer.name}, the first variant.`] : [])];
  get("schedule").dataset.hints = hints.join(" ");
  showScalars(answer.scalars);
}

function showScalars(declared) {
  const form = get("view");
  const known = new Set(declared.map(({ name }) => name));
  for (const old of form.querySelectorAll("[data-scalar]")) {
    if (!known.has(old.dataset.scalar)) { delete scalars[old.dataset.scalar]; old.closest(".field").remove(); }
  }
  for (const { name } of declared) {
    if (form.querySelector(`[data-scalar="${CSS.escape(name)}"]`)) continue;
    const input = element("input", { "data-scalar": name, placeholder: "example", inputmode: "decimal" });
    input.value = scalars[name] || "";
    input.addEventListener("input", () => { scalars[name] = input.value; edited(); });
    form.append(element("label", { class: "field", "data-field": `view.${name}` }, element("span", {}, name), input));
  }
}

function showPicture(picture) {
  get("pairs").src = picture.pairs;
  get("blocks").src = picture.blocks;
  get("caption").innerHTML = picture.caption;
  const percent = (share) => (share === 0 || share === 1 ? share * 100 : (share * 100).toFixed(1)) + " %";
  const names = ["empty", "partial", "full"];
  const rows = [["by block analysis", picture.shares.proven], ["pair by pair", picture.shares.found]].filter(([, s]) => s);
  get("shares").replaceChildren(
    element("tr", {}, element("th", {}, "blocks"), ...names.map((name) => element("th", {}, name))),
    ...rows.map(([label, shares]) => element("tr", {}, element("th", {}, label),
      ...names.map((name) => element("td", {}, percent(shares[name]))))));
  get("schedule").replaceChildren(
    element("b", {}, percent(picture.shares.proven.empty)), " of the blocks are skipped, ", element("b", {}, percent(picture.kept)),
    " of the pairs are kept. Schedule ", element("code", {}, picture.schedule), `: ${picture.schedule_meaning}. `,
    get("schedule").dataset.hints || "");
}

function showCall() {
  get("call").innerHTML = calls[framework];
  for (const tab of document.querySelectorAll("[data-code]")) {
    tab.setAttribute("aria-selected", tab.dataset.code === framework);
  }
}

const FAMILIES = [
  ["Portable kernels (Triton)", (f) => /^(portable|block_\w+|decay)\.py$/.test(f)],
  ["Hopper kernels (Gluon)", (f) => /^hopper_\w+\.py$/.test(f)],
  ["Ops, launches, references", (f) => !f.includes("/")],
  ["Packed sequences", (f) => f.startsWith("packed/")],
  ["Segment ids", (f) => f.startsWith("segmented/")],
];

async function loadKernels(retry = true) {
  const number = latest;
  const entry = get("f-yaml").value;
  try {
    const answer = await ask("api/kernels", { entry, file: shownFile });
    if (number !== latest) return;
    const left = new Set(answer.files);
    get("files").replaceChildren(...FAMILIES.map(([label, belongs]) => {
      const own = answer.files.filter((file) => left.has(file) && belongs(file));
      own.forEach((file) => left.delete(file));
      return element("optgroup", { label }, ...own.map((file) => element("option", { value: file }, file)));
    }));
    get("files").value = answer.file;
    get("lines").textContent = `${answer.lines} lines`;
    get("source").innerHTML = answer.html;
  } catch (error) {
    if (number !== latest) return;
    if (error.field === "file" && retry) { shownFile = "portable.py"; loadKernels(false); } else get("source").textContent = error.message;
  }
}

// --------------------------------------------------------------------------------------------------- the fragment

function keep(entry) {
  const state = new URLSearchParams({ entry });
  for (const input of get("view").querySelectorAll("[data-view]")) {
    if (Number(input.value) !== VIEW[input.dataset.view]) state.set(input.dataset.view, input.value);
  }
  history.replaceState(null, "", `#${state}`);
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const input of get("view").querySelectorAll("[data-view]")) {
    input.value = state.get(input.dataset.view) || VIEW[input.dataset.view];
  }
  if (state.has("entry")) {
    get("f-yaml").value = state.get("entry");
    mode = "yaml";
  } else {
    fillForm(START);
    mode = "form";
  }
}

// ------------------------------------------------------------------------------------------------------- the start

async function loadExamples() {
  const { examples, language } = await ask("api/examples");
  for (const file of new Set(examples.map((each) => each.file))) {
    const own = examples.filter((each) => each.file === file);
    get("examples").append(element("optgroup", { label: file }, ...own.map((each) =>
      element("option", { value: each.name, title: each.doc }, each.name))));
  }
  get("examples").addEventListener("change", () => {
    const found = examples.find((each) => each.name === get("examples").value);
    if (!found) return;
    get("f-yaml").value = found.entry;
    const isForm = !get("form").hidden;
    mode = "yaml";
    refresh().then(() => { if (isForm) choose("form"); });
  });
  get("language").replaceChildren(...Object.entries(language).flatMap(([label, names]) =>
    [element("dt", {}, label), element("dd", {}, ...names.flatMap((name) => [element("code", {}, name), " "]))]));
}

function start() {
  for (const [name, value] of Object.entries(VIEW)) {
    const input = element("input", { type: "number", "data-view": name, value });
    input.addEventListener("input", () => edited());
    get("view").append(element("label", { class: "field", "data-field": `view.${name}` }, element("span", {}, LABELS[name]), input));
  }
  get("view").dataset.field = "view";
  get("view").addEventListener("submit", (event) => event.preventDefault());
  get("fields").addEventListener("input", () => edited("form"));
  get("f-yaml").addEventListener("input", () => edited("yaml"));
  get("tab-form").addEventListener("click", () => choose("form"));
  get("tab-yaml").addEventListener("click", () => choose("yaml"));
  for (const add of document.querySelectorAll("[data-add]")) {
    add.addEventListener("click", () => addRow(add.dataset.add).querySelector("input, select").focus());
  }
  for (const tab of document.querySelectorAll("[data-code]")) {
    tab.addEventListener("click", () => { framework = tab.dataset.code; showCall(); });
  }
  get("files").addEventListener("change", () => { shownFile = get("files").value; loadKernels(); });
  get("share").addEventListener("click", async () => {
    await navigator.clipboard.writeText(location.href);
    get("share").textContent = "Copied";
    setTimeout(() => { get("share").textContent = "Copy link"; }, 1500);
  });
  restore();
  const first = refresh();
  // An entry from the address is edited in the form if it fits there.
  first.then(() => { if (mode === "yaml" && !get("fields").hidden) choose("form"); });
  loadExamples();
  window.addEventListener("hashchange", () => { restore(); refresh(); });
}

start();
