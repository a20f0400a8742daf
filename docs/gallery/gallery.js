// Filters the cards by words, kinds and schedule. Without it, all cards are listed.
(() => {
  const filters = document.querySelector(".ag-filters");
  if (!filters) return;
  const cards = [...document.querySelectorAll(".ag-card")];
  const search = filters.querySelector(".ag-search");
  const schedule = filters.querySelector(".ag-schedule");
  const chips = [...filters.querySelectorAll(".ag-chip")];
  const count = filters.querySelector(".ag-count");

  const chosen = () => chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((c) => c.dataset.kind);

  function apply() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kinds = chosen();
    let shown = 0;
    for (const card of cards) {
      const own = card.dataset.kinds.split(",");
      const fits =
        words.every((word) => card.dataset.words.includes(word)) &&
        kinds.every((kind) => own.includes(kind)) &&
        (!schedule.value || card.dataset.schedule === schedule.value);
      card.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${cards.length} variants`;
    const state = new URLSearchParams();
    if (search.value) state.set("q", search.value);
    if (kinds.length) state.set("kinds", kinds.join(","));
    if (schedule.value) state.set("schedule", schedule.value);
    history.replaceState(null, "", `#${state}`);
  }

  // The fragment keeps the filters, so that a choice can be linked to.
  const state = new URLSearchParams(location.hash.slice(1));
  search.value = state.get("q") || "";
  schedule.value = state.get("schedule") || "";
  const kinds = (state.get("kinds") || "").split(",");
  for (const chip of chips) {
    chip.setAttribute("aria-pressed", kinds.includes(chip.dataset.kind));
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") !== "true");
      apply();
    });
  }
  search.addEventListener("input", apply);
  schedule.addEventListener("change", apply);
  filters.hidden = false;
  if (location.hash.length > 1) apply();
})();
