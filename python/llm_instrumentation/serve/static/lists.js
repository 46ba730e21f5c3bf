// Lists that arrow keys move in, and pages of long lists.

import { count, h } from "./dom.js";

const KEYS = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

/**
 * Lets arrow keys move the focus among elements of a container. Only one of them is in the tab order.
 * With `follow` the element that gets the focus is clicked too.
 */
export function rove(container, selector, { follow = false } = {}) {
  const elements = () => [...container.querySelectorAll(selector)];
  const take = (chosen) => {
    for (const element of elements()) element.tabIndex = element === chosen ? 0 : -1;
  };
  const first = elements();
  take(first.find((one) => one.matches("[aria-current], [aria-pressed=true]")) ?? first[0]);
  container.addEventListener("focusin", (event) => {
    const element = event.target.closest(selector);
    if (element) take(element);
  });
  container.addEventListener("keydown", (event) => {
    const step = KEYS[event.key];
    const all = elements();
    const at = all.indexOf(document.activeElement);
    if (!step || at < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(all.length - 1, at + step))];
    next.focus();
    if (follow && next !== all[at]) next.click();
  });
}

/** Buttons for the pages of a list; nothing if one page has all. */
export function pager(total, begin, each, go) {
  if (total <= each && begin === 0) return null;
  const turn = (name, to, there) => h("button", { type: "button", disabled: !there, onclick: () => go(to) }, name);
  return h(
    "div",
    { class: "pager" },
    turn("Previous", Math.max(0, begin - each), begin > 0),
    h("span", {}, `${count(Math.min(begin + 1, total))} to ${count(Math.min(begin + each, total))} of ${count(total)}`),
    turn("Next", begin + each, begin + each < total),
  );
}
