CREATE TABLE wishes (
	url VARCHAR(255) NOT NULL,
	bypass BOOLEAN NOT NULL,
	CONSTRAINT wishes_pkey PRIMARY KEY (url)
);
INSERT INTO alembic_version VALUES ('0009');
