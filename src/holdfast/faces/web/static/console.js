// What a page cannot do by itself: hear what changed, copy a text, count what is selected. Without it all can be read.
(() => {
  "use strict";
  const body = document.body;
  let source = null;
  let mark = body.dataset.live || "";
  const missed = new Set();
  let asked = [];
  let isPressed = false;

  // Text that is marked in a part, to be copied.
  const isMarked = () => {
    const marked = document.getSelection();
    const node = marked === null || marked.isCollapsed ? null : marked.anchorNode;
    return node !== null && (node.nodeType === 1 ? node : node.parentElement).closest("[data-topics]") !== null;
  };

  // Somebody who selects rows, marks text, writes into a form, or is in the middle of a click keeps what is before his
  // eyes: a button that is swapped under the pointer would not be pressed.
  const isBusy = () =>
    isPressed || isMarked() || document.querySelector("[data-select]:checked") !== null ||
    (document.activeElement && document.activeElement.matches("main form[method=post] input:not([type=hidden]), main textarea, main select"));

  // The parts that are about a topic are read anew, all of them with one look at the page.
  const tellMissed = () => {
    if (missed.size === 0 || isBusy()) return;
    const parts = [...document.querySelectorAll("[data-topics]")].filter((part) => part.dataset.topics.split(" ").some((topic) => missed.has(topic)));
    asked = [...missed];
    missed.clear();
    if (parts.length === 0) return;
    const [first, ...others] = parts.map((part) => `#${CSS.escape(part.id)}`);
    htmx.ajax("GET", location.pathname + location.search, {
      source: parts[0], target: first, select: first, swap: "outerHTML", selectOOB: others.join(",") || undefined,
    }).catch(() => {});
  };

  // A browser has six connections for all tabs of a server: only the tab that is seen has one for news.
  const listen = () => {
    if (source !== null || document.hidden || !mark || !document.querySelector("[data-topics]")) return;
    source = new EventSource(`/live?since=${encodeURIComponent(mark)}`);
    source.addEventListener("changed", (event) => {
      mark = event.lastEventId || mark;
      event.data.split(" ").forEach((topic) => missed.add(topic));
      tellMissed();
    });
    source.addEventListener("ended", () => { stop(); location.reload(); });
  };
  const stop = () => { if (source !== null) { source.close(); source = null; } };
  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else listen(); });
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  listen();

  // What is swapped keeps what was in it: the focus (by id, or the same link or button), and what was opened.
  const keyOf = (element) => element.id ? `#${CSS.escape(element.id)}`
    : element.matches("a[href]") ? `a[href="${CSS.escape(element.getAttribute("href"))}"]`
    : element.matches("[name]") ? `${element.tagName.toLowerCase()}[name="${CSS.escape(element.name)}"][value="${CSS.escape(element.value)}"]`
    : element.matches("summary") ? "summary"
    : element.getAttribute("aria-label") ? `${element.tagName.toLowerCase()}[aria-label="${CSS.escape(element.getAttribute("aria-label"))}"]` : "";
  let kept = null;
  body.addEventListener("htmx:beforeSwap", (event) => {
    // An answer without the part (the session has ended, the server is starting) leaves what is there.
    if (event.detail.target.dataset.topics && !event.detail.serverResponse.includes(`id="${event.detail.target.id}"`)) {
      event.detail.shouldSwap = false;
      return;
    }
    // Who began while it was read is shown it afterwards.
    if (event.detail.target.dataset.topics && isBusy()) {
      asked.forEach((topic) => missed.add(topic));
      event.detail.shouldSwap = false;
      return;
    }
    const parts = [...document.querySelectorAll("[data-topics]"), event.detail.target];
    const active = parts.some((part) => part.contains(document.activeElement)) ? document.activeElement : null;
    const key = active ? keyOf(active) : "";
    kept = {
      key,
      place: key ? [...document.querySelectorAll(key)].indexOf(active) : -1,
      opened: [...document.querySelectorAll("[data-topics] details[open] > summary")].map((summary) => summary.textContent.trim()),
      scrolled: new Map([...document.querySelectorAll("[data-topics] .scroll")].map((box) => [box.getAttribute("aria-label"), box.scrollLeft])),
    };
  });
  body.addEventListener("htmx:afterSettle", () => {
    if (kept === null) return;
    document.querySelectorAll("[data-topics] details:not([open]) > summary").forEach((summary) => {
      if (kept.opened.includes(summary.textContent.trim())) summary.parentElement.open = true;
    });
    document.querySelectorAll("[data-topics] .scroll").forEach((box) => { box.scrollLeft = kept.scrolled.get(box.getAttribute("aria-label")) || 0; });
    if (kept.key && (document.activeElement === null || document.activeElement === body)) {
      const found = document.querySelectorAll(kept.key);
      const element = found[kept.place] || found[0];
      if (element) element.focus({ preventScroll: true });
    }
    kept = null;
  });

  // Copy, also where the page came by plain http and there is no clipboard to ask.
  const copied = (button) => {
    const text = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = text; }, 1500);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy], [data-copy-from]");
    if (!button) return;
    const area = document.createElement("textarea");
    const from = button.dataset.copyFrom;
    area.value = from ? document.querySelector(from).textContent : button.dataset.copy;
    area.className = "only-read";
    body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
    copied(button);
  });

  // Rows that are selected: how many, for the buttons below, which need at least one.
  const count = () => {
    document.querySelectorAll("[data-selected]").forEach((place) => {
      const number = document.querySelectorAll("[data-select]:checked").length;
      place.textContent = String(number);
      document.querySelectorAll("[data-needs-selected]").forEach((button) => { button.disabled = number === 0; });
    });
  };
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-select-all]")) {
      document.querySelectorAll("[data-select]").forEach((box) => { box.checked = event.target.checked; });
    }
    if (event.target.matches("[data-select], [data-select-all]")) { count(); tellMissed(); }
    if (event.target.matches("[data-submits]")) event.target.form.requestSubmit();
  });
  document.addEventListener("focusout", () => setTimeout(tellMissed, 0));
  document.addEventListener("pointerdown", () => { isPressed = true; });
  ["pointerup", "pointercancel"].forEach((name) => document.addEventListener(name, () => { isPressed = false; setTimeout(tellMissed, 0); }));
  document.addEventListener("selectionchange", tellMissed);
  body.addEventListener("htmx:afterSwap", count);
  count();

  // A link to something that is folded up unfolds it.
  const unfold = () => {
    const found = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (found && found.matches("details")) { found.open = true; found.scrollIntoView(); }
  };
  window.addEventListener("hashchange", unfold);
  unfold();

  // `/` goes to the search box, as in many places.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
    const box = document.querySelector("[data-search]");
    if (box) { event.preventDefault(); box.focus(); }
  });

  // What is offered for the search box completes the last term that is written in it.
  document.addEventListener("input", (event) => {
    if (!event.target.matches("[data-search]")) return;
    const written = event.target.value.match(/^(?:(?:[^\s"]|"(?:[^"\\]|\\.)*")*\s+)*/)[0];
    document.querySelectorAll("#terms option").forEach((option) => {
      option.dataset.term = option.dataset.term || option.value;
      option.value = written + option.dataset.term;
    });
  });

  document.querySelectorAll("[data-print]").forEach((button) => button.addEventListener("click", () => window.print()));
})();
