// Elements of the page. Built in chapter 23.

export const $ = (id) => document.getElementById(id);

// An element with properties and children; text stays text, whatever it contains.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child != null));
  return element;
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

// 0.0123 s is "12 ms".
export function duration(seconds) {
  const ms = seconds * 1000;
  return ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${seconds.toFixed(2)} s`;
}
