"""The statements of a script. What is not read for certain as bash reads it is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from compat.cli.bash.tokens import closing_of, refuse, token_at
from compat.cli.bash.values import LONGEST, ScriptError

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_FUNCTION_NAME = re.compile(r"[\w.:-]+")
# They end a list of statements, so none of them starts a command.
_CLOSING_WORDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", "in", "]]"}


class Redirect(NamedTuple):
    """A redirection, and the file or the document that it leads to."""

    operator: str
    target: str


@dataclass
class Statement:
    """A statement of a script.

    ====================  ====================================  ===================================
    kind                  words                                 bodies
    ====================  ====================================  ===================================
    simple                as written: A=1 run "$B"
    sum                   the text of (( ))
    test                  those between [[ and ]]
    if                                                          condition, body, condition, body...
    while, until                                                condition, body
    for                   the variable, then the list           body
    case                  the word that is compared             those of ``patterns``
    group, subshell                                             body
    function              its name                              body
    pipeline, not                                               each command
    &&, ||                                                      both sides
    background                                                  the statement
    ====================  ====================================  ===================================
    """

    kind: str
    line: int
    words: list[str] = field(default_factory=list)
    bodies: list[list[Statement]] = field(default_factory=list)
    patterns: list[list[str]] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


class _Lexeme(NamedTuple):
    kind: str  # "word", "operator", "redirect", "newline" or "end"
    text: str
    line: int


@dataclass
class _Document:
    """A here-document whose text begins behind the line."""

    delimiter: str
    has_tabs: bool
    redirects: list[Redirect]


def statements_of(text: str) -> list[Statement]:
    """The statements of a script. ScriptError if it is not read."""
    if len(text) > LONGEST:
        raise ScriptError(f"the launch line is longer than {LONGEST:,} characters.")
    if re.search(r"(?<!\\)\\[ \t]+\n", text):
        raise ScriptError("the launch line has a blank between a backslash and the line's end.")
    if re.search("[\ud800-\udfff]", text):
        raise ScriptError("the launch line is not valid Unicode.")
    return _Parser(text).statements()


def words_of(text: str) -> list[str]:
    """The words of an array, which may stand on several lines."""
    parser = _Parser(text)
    words = []
    parser.skip_newlines()
    while parser.next.kind != "end":
        words.append(parser.word())
        parser.skip_newlines()
    return words


class _Parser:
    """Reads words and operators one by one; ``next`` is the one that is not read yet."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.line = 1
        self.documents: list[_Document] = []
        self.next = self._lexeme()

    # Words and operators.

    def _lexeme(self) -> _Lexeme:
        """The word or operator at this place."""
        written = ""
        while self.place < len(self.text):
            token = token_at(self.text, self.place)
            kind = token.kind
            if kind == "redirect":
                # The number of a file goes to a variable: {fd}>log
                if written.startswith("{"):
                    refuse(self.text, self.place)
                if written.isdigit():  # 2>log
                    written = ""
            end = token.end
            # A=(8 4) is one word.
            is_array = token.content == "(" and _ARRAY.fullmatch(written)
            if is_array:
                end = closing_of(self.text, end, ")") + 1
            is_end = kind in ("blank", "comment", "newline", "redirect", "operator")
            if written and is_end and not is_array:
                break
            piece = self.text[self.place : end]
            self.place = end
            line = self.line
            self.line += piece.count("\n")
            if kind == "newline":
                self._read_documents()
            if is_array or not (is_end or kind == "continuation"):
                written += piece
            elif kind in ("newline", "redirect", "operator"):
                return _Lexeme(kind, piece, line)
        kind = "word" if written else "end"
        return _Lexeme(kind, written, self.line - written.count("\n"))

    def _read_documents(self) -> None:
        for document in self.documents:
            tabs = r"\t*" if document.has_tabs else ""
            end_line = re.compile(rf"^{tabs}{re.escape(document.delimiter)}(?:\n|\Z)", re.M)
            end = end_line.search(self.text, self.place)
            if end is None:
                refuse(self.text, self.place)
            content = self.text[self.place : end.start()]
            document.redirects.append(Redirect("<<", content))
            self.line += self.text.count("\n", self.place, end.end())
            self.place = end.end()
        self.documents = []

    def _advance(self) -> _Lexeme:
        """Read on; the word or operator that was next."""
        lexeme = self.next
        self.next = self._lexeme()
        return lexeme

    def _refuse(self) -> NoReturn:
        near = self.next.text + self.text[self.place : self.place + 40]
        raise ScriptError(
            f"line {self.next.line} of the launch line cannot be read as bash, at {near!r}. Close "
            f"its quotes and brackets, or write it simpler."
        )

    def _expect(self, text: str) -> None:
        if self.next.text != text:
            self._refuse()
        self._advance()

    def word(self) -> str:
        if self.next.kind != "word":
            self._refuse()
        return self._advance().text

    def skip_newlines(self) -> None:
        while self.next.kind == "newline":
            self._advance()

    # Statements.

    def statements(self, *ends: str) -> list[Statement]:
        """Statements up to one of the words that may end them; without any, up to the end."""
        statements: list[Statement] = []
        while True:
            self.skip_newlines()
            if self.next.kind == "end" and not ends:
                return statements
            if self.next.text in ends:
                # Only a case may do nothing.
                if not statements and ";;" not in ends:
                    self._refuse()
                return statements
            statement = self._and_or()
            if self.next.text == "&":
                statement = Statement("background", statement.line, bodies=[[statement]])
            if self.next.text in (";", "&"):
                self._advance()
            # `fi` needs a `;` or a newline before it, and `)` does not.
            elif self.next.kind not in ("newline", "end") and self.next.text not in ends:
                self._refuse()
            statements.append(statement)

    def _and_or(self) -> Statement:
        statement = self._pipeline()
        while self.next.text in ("&&", "||"):
            operator = self._advance().text
            self.skip_newlines()
            second = self._pipeline()
            statement = Statement(operator, second.line, bodies=[[statement], [second]])
        return statement

    def _pipeline(self) -> Statement:
        if self.next.text == "time":
            self._advance()
        line = self.next.line
        if self.next.text == "!":
            self._advance()
            return Statement("not", line, bodies=[[self._pipeline()]])
        parts = [[self._command()]]
        while self.next.text in ("|", "|&"):
            self._advance()
            self.skip_newlines()
            parts.append([self._command()])
        if len(parts) == 1:
            return parts[0][0]
        return Statement("pipeline", line, bodies=parts)

    def _command(self) -> Statement:
        text = self.next.text
        if text in _CLOSING_WORDS:
            self._refuse()
        if text == "function":
            self._advance()
            return self._function(self.word())
        if text not in _COMPOUND:
            return self._simple()
        statement = self._compound()
        while self.next.kind == "redirect":
            self._read_redirect(statement.redirects)
        return statement

    def _compound(self) -> Statement:
        opening = self.next
        statement = Statement(_COMPOUND[opening.text], opening.line)
        # `((` begins a sum, and `( (` two subshells.
        if opening.text == "(" and self.text.startswith("(", self.place):
            start = self.place + 1
            end = closing_of(self.text, start, ")")
            if not self.text.startswith(")", end + 1):
                self._refuse()
            statement.kind = "sum"
            statement.words = [self.text[start:end]]
            self.line += statement.words[0].count("\n")
            self.place = end + 2
            self._advance()
            return statement
        self._advance()
        match opening.text:
            case "(":
                statement.bodies = [self.statements(")")]
                self._advance()
            case "{":
                statement.bodies = [self.statements("}")]
                self._advance()
            case "if":
                self._read_if(statement)
            case "while" | "until":
                statement.bodies = [self.statements("do"), self._loop_body()]
            case "for":
                self._read_for(statement)
            case "case":
                self._read_case(statement)
            case "[[":
                while self.next.text != "]]":
                    if self.next.kind == "end":
                        self._refuse()
                    statement.words.append(self._advance().text)
                    self.skip_newlines()
                self._advance()
        return statement

    def _read_if(self, statement: Statement) -> None:
        keyword = "if"
        while keyword != "fi":
            if keyword == "else":
                statement.bodies += [[], self.statements("fi")]
            else:
                condition = self.statements("then")
                self._advance()
                statement.bodies += [condition, self.statements("elif", "else", "fi")]
            keyword = self._advance().text

    def _loop_body(self) -> list[Statement]:
        self._expect("do")
        body = self.statements("done")
        self._advance()
        return body

    def _read_for(self, statement: Statement) -> None:
        statement.words.append(self.word())
        self.skip_newlines()
        if self.next.text == "in":
            self._advance()
            while self.next.kind == "word":
                statement.words.append(self.word())
        else:
            statement.words.append('"$@"')
        if self.next.text == ";":
            self._advance()
        self.skip_newlines()
        statement.bodies = [self._loop_body()]

    def _read_case(self, statement: Statement) -> None:
        statement.words.append(self.word())
        self.skip_newlines()
        self._expect("in")
        self.skip_newlines()
        while self.next.text != "esac":
            if self.next.text == "(":
                self._advance()
            patterns = [self.word()]
            while self.next.text == "|":
                self._advance()
                patterns.append(self.word())
            self._expect(")")
            statement.patterns.append(patterns)
            statement.bodies.append(self.statements(";;", "esac"))
            if self.next.text == ";;":
                self._advance()
                self.skip_newlines()
        self._advance()

    def _simple(self) -> Statement:
        statement = Statement("simple", self.next.line)
        while self.next.kind in ("word", "redirect"):
            if self.next.kind == "redirect":
                self._read_redirect(statement.redirects)
            else:
                statement.words.append(self.word())
        if self.next.text == "(":
            if len(statement.words) != 1 or statement.redirects:
                self._refuse()
            return self._function(statement.words[0])
        if not statement.words and not statement.redirects:
            self._refuse()
        return statement

    def _function(self, name: str) -> Statement:
        line = self.next.line
        if self.next.text == "(":
            self._advance()
            self._expect(")")
        self.skip_newlines()
        if self.next.text not in _COMPOUND or not _FUNCTION_NAME.fullmatch(name):
            self._refuse()
        return Statement("function", line, [name], [[self._command()]])

    def _read_redirect(self, redirects: list[Redirect]) -> None:
        operator = self._advance().text
        if not operator.startswith("<<") or operator == "<<<":
            redirects.append(Redirect(operator, self.word()))
            return
        # The document begins behind the newline, which is not read yet.
        if self.next.kind != "word":
            self._refuse()
        is_quoted = re.search(r"""['"\\]""", self.next.text)
        delimiter = re.sub(r"""['"\\]""", "", self.next.text)
        # What a document with a quoted delimiter holds is not expanded.
        if is_quoted:
            redirects = []
        self.documents.append(_Document(delimiter, operator == "<<-", redirects))
        self._advance()


_COMPOUND = {
    "(": "subshell",
    "{": "group",
    "if": "if",
    "while": "while",
    "until": "until",
    "for": "for",
    "case": "case",
    "[[": "test",
}
