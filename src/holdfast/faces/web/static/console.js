// What a page cannot do by itself: hear what changed, copy a text, count what is selected. Without it all can be read.
(() => {
  "use strict";
  const body = document.body;
  let source = null;
  const missed = new Set();

  // Somebody who selects rows, or writes into a form, keeps what is before his eyes.
  const isBusy = () =>
    document.querySelector("[data-select]:checked") !== null ||
    (document.activeElement && document.activeElement.matches("main form[method=post] input:not([type=hidden]), main textarea, main select"));

  const tell = (topic) => {
    if (isBusy()) { missed.add(topic); return; }
    htmx.trigger(body, `live-${topic}`);
  };
  const tellMissed = () => {
    if (missed.size === 0 || isBusy()) return;
    const topics = [...missed];
    missed.clear();
    topics.forEach(tell);
  };

  // A browser has six connections for all tabs of a server: only the tab that is seen has one for news.
  const listen = () => {
    if (source !== null || document.hidden || !body.hasAttribute("data-live") || !document.querySelector("[hx-trigger*='live-']")) return;
    source = new EventSource("/live");
    source.addEventListener("changed", (event) => event.data.split(" ").forEach(tell));
    source.addEventListener("ended", () => { stop(); location.reload(); });
  };
  const stop = () => { if (source !== null) { source.close(); source = null; } };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stop(); return; }
    if (body.hasAttribute("data-live")) document.querySelectorAll("[hx-trigger*='live-']").forEach((part) => {
      part.getAttribute("hx-trigger").split(",").forEach((trigger) => missed.add(trigger.trim().split(" ")[0].replace("live-", "")));
    });
    tellMissed();
    listen();
  });
  window.addEventListener("pagehide", stop);
  listen();

  // Copy, also where the page came by plain http and there is no clipboard to ask.
  const copied = (button) => {
    const text = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = text; }, 1500);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const area = document.createElement("textarea");
    area.value = button.dataset.copy;
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
  body.addEventListener("htmx:afterSwap", count);
  count();

  // `/` goes to the search box, as in many places.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
    const box = document.querySelector("[data-search]");
    if (box) { event.preventDefault(); box.focus(); }
  });

  document.querySelectorAll("[data-print]").forEach((button) => button.addEventListener("click", () => window.print()));
})();
