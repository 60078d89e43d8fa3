CREATE TABLE stage_windows (
	id INTEGER NOT NULL,
	store VARCHAR(255) NOT NULL,
	stage VARCHAR(255) NOT NULL,
	phase VARCHAR(255) NOT NULL,
	gpu VARCHAR(255) NOT NULL,
	start DATETIME NOT NULL,
	seconds DOUBLE NOT NULL,
	gpu_seconds DOUBLE NOT NULL,
	tokens DOUBLE NOT NULL,
	utilization DOUBLE,
	memory_used_bytes BIGINT,
	memory_free_bytes BIGINT,
	power_watts DOUBLE,
	energy_joules DOUBLE,
	PRIMARY KEY (id)
);
INSERT INTO alembic_version VALUES ('0002');
