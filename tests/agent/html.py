"""HTML that is read strictly."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "input"}


class Page(HTMLParser):
    """Elements of an HTML text; an element that is not closed in order fails the test."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open, f"<{tag}/> is only for SVG"
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, *tags):
        return [attrs for tag, attrs, _ in self.elements if tag in tags]
