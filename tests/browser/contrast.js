// For each piece of text on the page: where it is, its contrast against what is behind it, and what it needs (WCAG AA).
() => {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const rgba = (text) => {
        pen.clearRect(0, 0, 1, 1);
        pen.fillStyle = text;
        pen.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, below, opacity = 1) => {
        const a = top[3] * opacity;
        return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)).concat(1);
    };
    const light = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
        if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || element.closest("[disabled], option, .hidden, .skip, svg")) continue;
        const chain = [];
        for (let one = element; one; one = one.parentElement) chain.unshift(one);
        let below = rgba(getComputedStyle(document.body).backgroundColor), opacity = 1;
        for (const one of chain) {
            const style = getComputedStyle(one);
            opacity *= Number(style.opacity);
            below = over(rgba(style.backgroundColor), below, opacity);
        }
        const style = getComputedStyle(element), size = parseFloat(style.fontSize);
        const [a, b] = [light(over(rgba(style.color), below, opacity)), light(below)].sort((x, y) => y - x);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        found.push([text.slice(0, 40), `${element.tagName}.${element.className}`, (a + 0.05) / (b + 0.05), large ? 3 : 4.5]);
    }
    return found;
}
