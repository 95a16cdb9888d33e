// Keeps the place in the map that a link was for: browsers carry the fragment through the redirects.
const form = document.querySelector("form");
form.action = "login" + location.hash;
