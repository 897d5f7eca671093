// Makes elements. Text is always set as text, never as HTML.

export const byId = (id) => document.getElementById(id);

export function element(name, {class: className = "", text, ...attributes} = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Shows an error in an alert, or hides the alert.
export function showAlert(alert, text) {
  alert.hidden = !text;
  alert.textContent = text ?? "";
}

// Tells users of screen readers what has happened.
export function announce(text) {
  byId("status").textContent = text;
}
